"""Likelihood of foreign text under this node's policy: answers that are far too unlikely are not
trained on, and of more candidates than a step uses, the likeliest or least likely are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import msgspec
import torch
from torch import Tensor, nn

from services.trainer.gradient.importance import known_logprobs
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import BatchLogprobs, KnownLogprobs, UpdateConfig, batch_logprobs, likely_answers
from services.trainer.parallel import ALONE, Parallel
from services.trainer.selection.intake import Intake, IntakeRules, take_in
from shared.config.trainer_section import TrainerSection
from shared.contracts.messages import Batch, BatchItem, Preference, source_name
from shared.seeds import number_from

# A verifier judges the answer at the end, not the text that leads to it, so a node can wrap a right
# answer in poisoned reasoning. The mean log-probability under this node's policy distinguishes such
# text from text that the policy might have produced (arXiv 2511.09780). How likely a policy finds
# its own text differs from model to model; how much less likely it finds other nodes' text hardly
# does. So the bound is relative to the mean of the same batch's local answers, and needs neither
# tuning for a model nor memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsurdTextRules:
    """fraction: part of the foreign groups that is checked. min_logprob: smallest mean logprob per
    token, in nats.

    slack: how many nats per token a foreign answer may be below the mean of the batch's local
    answers; None: only `min_logprob` applies.
    """

    fraction: float
    min_logprob: float
    slack: float | None = None

    @classmethod
    def of(cls, trainer: TrainerSection) -> AbsurdTextRules:
        """The rules of a node's configuration."""
        return cls(
            fraction=trainer.constants.policy_check_fraction,
            min_logprob=trainer.constants.min_foreign_logprob,
            slack=trainer.constants.foreign_logprob_slack,
        )


def drop_absurd(
    model: nn.Module,
    intake: Intake,
    config: UpdateConfig,
    rules: AbsurdTextRules,
    batch_seed: int,
    parallel: Parallel = ALONE,
    known: KnownLogprobs | None = None,
) -> tuple[Intake, Counter[str]]:
    """The intake without the foreign answers that are absurd under `model` in its current state,
    and their number by node.

    A dropped answer still counts in its group's baseline. A group without any answers left is
    skipped as `absurd`. The same batch and weights give the same result on a CPU: the batch's seed
    and the group's id determine which groups are checked, and a sender cannot know the batch in
    advance.
    """
    looked_at = groups_to_check(intake, config, rules, batch_seed)
    if not looked_at:
        return intake, Counter()
    logprobs = batch_logprobs(model, [intake.groups[index] for index in looked_at], config, parallel, known=known)
    least = least_logprob(local_means(intake.groups), rules)
    kept = {
        index: likely_answers(intake.groups[index], of_group, least) for index, of_group in zip(looked_at, logprobs, strict=True)
    }
    return without_absurd(intake, kept)


def groups_to_check(intake: Intake, config: UpdateConfig, rules: AbsurdTextRules, batch_seed: int) -> list[int]:
    """Indexes in `intake.groups` of the foreign groups that are checked. Demonstrations are not:
    what a person or a larger model writes is unlikely text.
    """
    return [
        index
        for index, (group, (_, group_id)) in enumerate(zip(intake.groups, intake.authors, strict=True))
        if not group.is_local
        and group_id not in intake.demonstrations
        and config.takes_part(group)
        and _chance(batch_seed, group_id) < rules.fraction
    ]


def least_logprob(local_means: Sequence[float], rules: AbsurdTextRules) -> float:
    """The smallest allowed mean logprob per token of a foreign answer, given those of the batch's
    local answers when they were sampled.

    Without local answers there is nothing to compare with, and only `min_logprob` applies.
    """
    known = [mean for mean in local_means if math.isfinite(mean)]
    if rules.slack is None or not known:
        return rules.min_logprob
    return max(rules.min_logprob, math.fsum(known) / len(known) - rules.slack)


def local_means(groups: Sequence[TokenGroup]) -> list[float]:
    """Mean logprob per token of every local answer whose logprobs are known, under the policy that
    sampled it.

    Replayed answers are left out: an older policy gave its own text a lower likelihood, which would
    lower the bound for foreign text.
    """
    return [
        math.fsum(logprobs) / len(logprobs)
        for group in groups
        if group.is_local and not group.replayed
        for number in range(len(group.completions))
        if (logprobs := known_logprobs(group, number))
    ]


def without_absurd(intake: Intake, kept: Mapping[int, Sequence[int]]) -> tuple[Intake, Counter[str]]:
    """The result of `drop_absurd`, given the answers to keep of each group that was checked.

    Every group keeps its index: one without answers left stays, and takes part in nothing.
    """
    dropped: Counter[str] = Counter()
    groups, gone = list(intake.groups), 0
    skipped_of, dropped_of = dict(intake.skipped_of), dict(intake.dropped_of)
    for index, numbers in kept.items():
        group, (node, group_id) = intake.groups[index], intake.authors[index]
        if len(numbers) == len(group.completions):
            continue
        dropped[node] += len(group.completions) - len(numbers)
        groups[index] = group.only(numbers)
        if numbers:
            places = zip(group.places, group.advantages, strict=False)
            without = {place: ("absurd", advantage) for number, (place, advantage) in enumerate(places) if number not in numbers}
            dropped_of[group_id] = dropped_of.get(group_id, {}) | without
        else:
            skipped_of[group_id] = "absurd"
            gone += 1
    return (
        replace(
            intake,
            groups=groups,
            external=intake.external - gone,
            skipped=intake.skipped + Counter({"absurd": gone}),
            skipped_of=skipped_of,
            dropped_of=dropped_of,
        ),
        dropped,
    )


def _chance(batch_seed: int, group_id: str) -> float:
    return number_from(f"own-policy {batch_seed} {group_id}") / 2**64


# The sampler has no model. If its strategy depends on likelihood, it sends more candidates than J
# and says how many to keep (`Batch.preference`). The choice is made here, where the model computes
# the text anyway. The same batch and weights give the same choice on a CPU, so a resumed trainer
# trains on the same groups.


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferred:
    """The batch with only the chosen foreign groups, and figures of the choice.

    left_out: candidates that are not trained on. mastered_of: those of them that would teach this
    policy nothing, by node. logprob, logprob_left_out: mean logprob per token, in nats, of the text
    of the chosen groups and of the others; None without such groups.
    """

    batch: Batch
    left_out: int = 0
    mastered_of: Counter[str] = field(default_factory=Counter)
    logprob: float | None = None
    logprob_left_out: float | None = None

    def record(self, absurd: Counter[str]) -> LikelihoodRecord:
        """The part of the step's record; absurd: number of absurd answers by node."""
        return LikelihoodRecord(
            groups_left_out=self.left_out,
            mastered_of=dict(sorted(self.mastered_of.items())),
            logprob_external=self.logprob,
            logprob_left_out=self.logprob_left_out,
            answers_absurd=absurd.total(),
            absurd_of=dict(sorted(absurd.items())),
        )


@dataclass(frozen=True, kw_only=True)
class LikelihoodRecord:
    """The part of a step's record about the likelihood of foreign text.

    groups_left_out: candidates that were not preferred. mastered_of: those of them whose rewarded
    answers this policy gives already, by node. logprob_external, logprob_left_out: mean
    logprobs per token of the chosen groups' text and of the others'. answers_absurd: foreign
    answers that were not trained on because this node's policy finds them absurd; absurd_of: by
    node.
    """

    groups_left_out: int = 0
    mastered_of: dict[str, int] = field(default_factory=dict)
    logprob_external: float | None = None
    logprob_left_out: float | None = None
    answers_absurd: int = 0
    absurd_of: dict[str, int] = field(default_factory=dict)


def prefer(
    model: nn.Module,
    batch: Batch,
    rules: IntakeRules,
    config: UpdateConfig,
    parallel: Parallel = ALONE,
    known: KnownLogprobs | None = None,
) -> Preferred:
    """Choose among the batch's foreign groups by its `preference`, under `model` in its current
    state.

    A candidate that cannot be trained on, or whose likelihood is not a number, comes last.
    """
    taken = candidates_of(batch, rules)
    if taken is None or batch.preference is None:
        return Preferred(batch=batch)
    fresh = [item for item in batch.items if item.scored.origin == "local" and not item.replayed]
    local = take_in(msgspec.structs.replace(batch, items=fresh), rules).groups if fresh else []
    if batch.preference.by == "order":
        return first_that_teach(model, batch, taken, repeated_share(local), config, parallel, known)
    return prefer_by(batch, taken, batch_logprobs(model, taken.groups, config, parallel, known=known), repeated_share(local))


def candidates_of(batch: Batch, rules: IntakeRules) -> Intake | None:
    """The foreign groups that `prefer` chooses from; None if there is nothing to choose."""
    candidates = [item for item in batch.items if _is_candidate(item)]
    if batch.preference is None or not candidates:
        return None
    return take_in(msgspec.structs.replace(batch, items=candidates), rules)


def _is_candidate(item: BatchItem) -> bool:
    return item.scored.origin == "external" and item.pass_rate is None


def prefer_by(batch: Batch, taken: Intake, logprobs: BatchLogprobs, usually_repeated: float = 0.0) -> Preferred:
    """The result of `prefer`, given this node's own `logprobs` of the groups in `taken`, the
    batch's `candidates_of`, and the `repeated_share` of its local answers.
    """
    preference = batch.preference
    assert preference is not None
    items = [item.scored for item in batch.items if _is_candidate(item)]
    rated = {
        group_id: (text_logprob(group, of_group), gives_already(group, of_group), repeats_itself(group, usually_repeated))
        for group, (_, group_id), of_group in zip(taken.groups, taken.authors, logprobs, strict=True)
        if of_group
    }
    found = [rated.get(scored.group_id, (math.nan, False, False)) for scored in items]
    candidates = [
        CandidateGroup(
            logprob=logprob,
            barred=mastered or repetitive,
            sender=scored.sender_account,
            source=source_name(scored.group.task.ref.dataset, scored.group.task.ref.config),
            lot=number_from(f"candidate {batch.seed} {scored.group_id}"),
        )
        for scored, (logprob, mastered, repetitive) in zip(items, found, strict=True)
    ]
    chosen = preferred_indices(candidates, preference, batch.seed)
    kept = {items[index].group_id for index in chosen}
    return Preferred(
        batch=msgspec.structs.replace(
            batch, items=[item for item in batch.items if not _is_candidate(item) or item.scored.group_id in kept]
        ),
        left_out=len(items) - len(chosen),
        mastered_of=Counter(scored.group.node for scored, (_, mastered, _) in zip(items, found, strict=True) if mastered),
        logprob=_mean([candidates[index].logprob for index in chosen]),
        logprob_left_out=_mean([each.logprob for index, each in enumerate(candidates) if index not in set(chosen)]),
    )


def first_that_teach(
    model: nn.Module,
    batch: Batch,
    taken: Intake,
    usually_repeated: float,
    config: UpdateConfig,
    parallel: Parallel,
    known: KnownLogprobs | None,
) -> Preferred:
    """The batch with the first candidates, in the order of the draw, that teach this policy
    something.

    Only answers that decide it are computed: rewarded short ones, of the candidates that would
    take a place. One found to be mastered leaves its place to the next.
    """
    preference = batch.preference
    assert preference is not None
    items = [item.scored for item in batch.items if _is_candidate(item)]
    groups = {group_id: group for group, (_, group_id) in zip(taken.groups, taken.authors, strict=True)}
    able = [scored.group_id in groups and config.takes_part(groups[scored.group_id]) for scored in items]
    barred = {
        index for index, scored in enumerate(items) if able[index] and repeats_itself(groups[scored.group_id], usually_repeated)
    }
    mastered: Counter[str] = Counter()
    looked_at = set(barred)
    while True:
        chosen = filled_places(
            [(scored.sender_account, source_name(scored.group.task.ref.dataset, scored.group.task.ref.config)) for scored in items],
            sorted((index for index in range(len(items)) if index not in barred), key=lambda index: not able[index]),
            preference,
        )
        unknown = [index for index in chosen if able[index] and index not in looked_at]
        if not unknown:
            break
        looked_at.update(unknown)
        rewarded = [deciding_answers(groups[items[index].group_id]) for index in unknown]
        found = batch_logprobs(model, rewarded, config, parallel, known=known)
        for index, group, logprobs in zip(unknown, rewarded, found, strict=True):
            if gives_already(group, logprobs):
                barred.add(index)
                mastered[items[index].group.node] += 1
    kept = {items[index].group_id for index in chosen}
    return Preferred(
        batch=msgspec.structs.replace(
            batch, items=[item for item in batch.items if not _is_candidate(item) or item.scored.group_id in kept]
        ),
        left_out=len(items) - len(chosen),
        mastered_of=mastered,
    )


def filled_places(candidates: Sequence[tuple[str, str]], order: Iterable[int], preference: Preference) -> list[int]:
    """Indexes of the candidates that get a place, sorted. candidates: sender and source of each.

    One source gets more than `source_cap` only where other sources have too few.
    """
    chosen: list[int] = []
    senders, sources = Counter[str](), Counter[str]()
    new = frozenset(preference.newcomers)
    room_for_new = math.inf if preference.newcomers_most is None else preference.newcomers_most
    order = list(order)
    for of_source in (math.inf if preference.source_cap is None else preference.source_cap, math.inf):
        for index in order:
            sender, source = candidates[index]
            full = senders[sender] >= preference.node_cap or sources[source] >= of_source
            if len(chosen) >= preference.keep or index in chosen or full or (sender in new and room_for_new <= 0):
                continue
            room_for_new -= sender in new
            senders[sender] += 1
            sources[source] += 1
            chosen.append(index)
    return sorted(chosen)


SHORT = 64
"""Longer answers are not compared with what the policy gives already, because it would have to be
almost certain of every token.
"""


def deciding_answers(group: TokenGroup) -> TokenGroup:
    """The group's rewarded answers of at most `SHORT` tokens."""
    rewarded = zip(group.completions, group.advantages, strict=True)
    return group.only([number for number, (ids, advantage) in enumerate(rewarded) if advantage > 0.0 and len(ids) <= SHORT])


MASTERED = 0.5
"""A group teaches nothing if this policy gives one of its rewarded answers, word for word, with at
least this probability. Long answers never are: there the record on their source decides
(`services.sampler.pool`).
"""


def gives_already(group: TokenGroup, logprobs: Sequence[Tensor]) -> bool:
    """Say whether the policy gives the group's rewarded answers already, from the logprobs of its
    completions' tokens.
    """
    answers = {
        tuple(ids): float(of_tokens.sum())
        for ids, of_tokens, advantage in zip(group.completions, logprobs, group.advantages, strict=True)
        if advantage > 0.0
    }
    return math.fsum(math.exp(min(0.0, each)) for each in answers.values() if math.isfinite(each)) >= MASTERED


@dataclass(frozen=True, slots=True)
class CandidateGroup:
    """A foreign group that may be chosen. logprob: mean logprob per token of its text, where that
    is new. barred: it is mastered or repeats itself. sender: the account that it counts
    against. lot: an even random number.
    """

    logprob: float
    barred: bool
    sender: str
    source: str
    lot: int


def preferred_indices(candidates: Sequence[CandidateGroup], preference: Preference, seed: int) -> list[int]:
    """Indexes of the candidates to keep, in order.

    First `by_lot` of them by lot, each of another sender while there is one: whatever likely text a
    sender makes, and however much of it, the others keep a part. Then by likelihood; beyond
    `source_cap` groups of one source only where other sources have too few. A barred one takes no
    place, so there may be fewer than wanted.
    """
    sign = -1.0 if preference.by == "near" else 1.0
    able = [index for index, each in enumerate(candidates) if not each.barred]

    def rank(index: int) -> float:
        return sign * candidates[index].logprob if math.isfinite(candidates[index].logprob) else math.inf

    turns: Counter[str] = Counter()
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(
        (index for index in able if math.isfinite(candidates[index].logprob)), key=lambda index: candidates[index].lot
    ):
        sender = candidates[index].sender
        places[index] = (turns[sender], number_from(f"sender {seed} {sender}"))
        turns[sender] += 1
    chosen: list[int] = []
    senders, sources = Counter[str](), Counter[str]()
    new = frozenset(preference.newcomers)
    room_for_new = math.inf if preference.newcomers_most is None else preference.newcomers_most

    def take(order: Iterable[int], most: int, of_source: float) -> None:
        nonlocal room_for_new
        for index in order:
            each = candidates[index]
            if len(chosen) >= most:
                return
            full = senders[each.sender] >= preference.node_cap or sources[each.source] >= of_source
            if index in chosen or full or (each.sender in new and room_for_new <= 0):
                continue
            room_for_new -= each.sender in new
            senders[each.sender] += 1
            sources[each.source] += 1
            chosen.append(index)

    source_cap = math.inf if preference.source_cap is None else preference.source_cap
    take(sorted(places, key=places.__getitem__), min(preference.by_lot, preference.keep), source_cap)
    for of_source in (source_cap, math.inf):
        take(sorted(able, key=rank), preference.keep, of_source)
    return sorted(chosen)


NGRAM = 3
REPEATED_TOKENS = 24
REPEATED_SLACK = 0.4
"""A group repeats itself if, of an answer that is trained on, at least `REPEATED_TOKENS` tokens say
again what was said, and their share is `REPEATED_SLACK` above the local answers' mean. Answers of a
few tokens, such as a small matrix of zeros, may.
"""


def repeated_share(groups: Sequence[TokenGroup]) -> float:
    """Mean over the groups' answers of the share of tokens that say again what was said."""
    shares = [
        1.0 - int(new.sum()) / length
        for group in groups
        for new, length in zip(new_tokens(group), group.sampled_lengths, strict=True)
        if length
    ]
    return fmean(shares) if shares else 0.0


def repeats_itself(group: TokenGroup, usual: float) -> bool:
    """Say whether one of the group's answers repeats itself; usual: `repeated_share` of local
    answers.
    """
    for new, length in zip(new_tokens(group), group.sampled_lengths, strict=True):
        repeated = length - int(new.sum())
        if repeated >= REPEATED_TOKENS and repeated / length > usual + REPEATED_SLACK:
            return True
    return False


def text_logprob(group: TokenGroup, logprobs: Sequence[Tensor]) -> float:
    """Mean logprob per token of what the group's policy said, in nats, where that is new
    (`is_new`).
    """
    kept = torch.cat([of_tokens.double()[said] for of_tokens, said in zip(logprobs, new_tokens(group), strict=True)])
    return float(kept.mean())


def new_tokens(group: TokenGroup) -> list[Tensor]:
    """For each answer, which of its tokens the policy sampled and are new (`is_new`)."""
    found = []
    for number, ids in enumerate(group.completions):
        sampled = group.sampled_of(number)
        new = is_new(group.prompt_ids, ids)
        found.append(new if sampled is None else new & torch.tensor(list(sampled), dtype=torch.bool))
    return found


def is_new(prompt_ids: Sequence[int], ids: Sequence[int]) -> Tensor:
    """For each token of an answer, whether it does not end a run of `NGRAM` tokens that prompt or
    answer have said before; shape (len(ids),). The first token always is new.

    A pretrained model finds almost certain what has been said before, so a mean over all tokens
    rates a repeated text above an honest one.
    """
    text = torch.tensor([*prompt_ids, *ids], dtype=torch.int64)
    new = torch.ones(len(text), dtype=torch.bool)
    if len(text) >= NGRAM:
        runs, first = text.unfold(0, NGRAM, 1), torch.full((len(text),), len(text))
        _, kind = runs.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
        first.scatter_reduce_(0, kind, torch.arange(len(runs)), "amin")
        new[NGRAM - 1 :] = first[kind] == torch.arange(len(runs))
    new[len(prompt_ids)] = True
    return new[len(prompt_ids) :]


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None
