"""Foreign text under this node's policy: answers that are far too unlikely are not trained on, and
groups that this policy would not learn from take no place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import msgspec
import torch
from torch import Tensor, nn

from services.trainer.gradient.importance import known_logprobs
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import KnownLogprobs, UpdateConfig, batch_logprobs, likely_answers
from services.trainer.parallel import ALONE, Parallel
from services.trainer.selection.intake import Intake, IntakeRules, take_in
from shared.config.trainer_section import TrainerSection
from shared.contracts.messages import Batch, BatchItem, Places, ScoredGroup, source_name
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


# The sampler has no model, so it sends more candidates than a step takes, in the order of the draw,
# and says how many places there are (`Batch.places`). What would teach this policy nothing takes no
# place. The same batch and weights give the same choice on a CPU, so a resumed trainer trains on
# the same groups.

SPARE, MASTERED_ALREADY, REPETITION = "spare", "mastered", "repetition"
"""Why a candidate has no place: those before it filled them; this policy gives its rewarded answers
already; it says the same again and again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The batch with only the candidates that have a place. left_out: why each other one has none,
    by its id. mastered_of: number of the mastered ones by node.
    """

    batch: Batch
    left_out: dict[str, str] = field(default_factory=dict)
    mastered_of: Counter[str] = field(default_factory=Counter)

    def record(self, absurd: Counter[str]) -> LikelihoodRecord:
        """The part of the step's record; absurd: number of absurd answers by node."""
        return LikelihoodRecord(
            groups_left_out=len(self.left_out),
            mastered_of=dict(sorted(self.mastered_of.items())),
            answers_absurd=absurd.total(),
            absurd_of=dict(sorted(absurd.items())),
        )


@dataclass(frozen=True, kw_only=True)
class LikelihoodRecord:
    """The part of a step's record about foreign text under this node's policy.

    groups_left_out: candidates without a place. mastered_of: those of them whose rewarded answers
    this policy gives already, by node. answers_absurd: foreign answers that were not trained on
    because this node's policy finds them absurd; absurd_of: by node.
    """

    groups_left_out: int = 0
    mastered_of: dict[str, int] = field(default_factory=dict)
    answers_absurd: int = 0
    absurd_of: dict[str, int] = field(default_factory=dict)


def choose(
    model: nn.Module,
    batch: Batch,
    rules: IntakeRules,
    config: UpdateConfig,
    parallel: Parallel = ALONE,
    known: KnownLogprobs | None = None,
) -> Chosen:
    """Fill the places of the batch's foreign groups with the first, in the order of the draw, that
    teach `model` something in its current state.

    Only answers that decide it are computed: short rewarded ones, of candidates that would take a
    place. One found to be mastered leaves its place to the next. A candidate that cannot be trained
    on comes last.
    """
    items = [item.scored for item in batch.items if _is_candidate(item)]
    if batch.places is None or not items:
        return Chosen(batch=batch)
    taken = take_in(msgspec.structs.replace(batch, items=[item for item in batch.items if _is_candidate(item)]), rules)
    groups = {group_id: group for group, (_, group_id) in zip(taken.groups, taken.authors, strict=True) if config.takes_part(group)}
    fresh = [item for item in batch.items if item.scored.origin == "local" and not item.replayed]
    usual = repeated_share(take_in(msgspec.structs.replace(batch, items=fresh), rules).groups)
    barred = {group_id: REPETITION for group_id, group in groups.items() if repeats_itself(group, usual)}
    looked_at: set[str] = set()
    mastered_of: Counter[str] = Counter()
    by_use = sorted(items, key=lambda scored: scored.group_id not in groups)
    while True:
        chosen = filled_places([scored for scored in by_use if scored.group_id not in barred], batch.places)
        unknown = [scored for scored in chosen if scored.group_id in groups and scored.group_id not in looked_at]
        if not unknown:
            break
        looked_at.update(scored.group_id for scored in unknown)
        rewarded = [rewarded_short(groups[scored.group_id]) for scored in unknown]
        logprobs = batch_logprobs(model, rewarded, config, parallel, known=known)
        for scored, group, of_group in zip(unknown, rewarded, logprobs, strict=True):
            if gives_already(group, of_group):
                barred[scored.group_id] = MASTERED_ALREADY
                mastered_of[scored.group.node] += 1
    kept = {scored.group_id for scored in chosen}
    return Chosen(
        batch=msgspec.structs.replace(
            batch, items=[item for item in batch.items if not _is_candidate(item) or item.scored.group_id in kept]
        ),
        left_out={scored.group_id: barred.get(scored.group_id, SPARE) for scored in items if scored.group_id not in kept},
        mastered_of=mastered_of,
    )


def _is_candidate(item: BatchItem) -> bool:
    # A demonstration, which alone has a pass rate, takes no place.
    return item.scored.origin == "external" and item.pass_rate is None


def filled_places(candidates: Sequence[ScoredGroup], places: Places) -> list[ScoredGroup]:
    """The first candidates that the caps allow. One source gets more than its cap only where other
    sources have too few.
    """
    chosen: dict[str, ScoredGroup] = {}
    senders, sources = Counter[str](), Counter[str]()
    new = frozenset(places.newcomers)
    room_for_new = math.inf if places.newcomers_most is None else places.newcomers_most
    for source_cap in (math.inf if places.source_cap is None else places.source_cap, math.inf):
        for scored in candidates:
            sender, ref = scored.sender_account, scored.group.task.ref
            source = source_name(ref.dataset, ref.config)
            full = senders[sender] >= places.node_cap or sources[source] >= source_cap or (sender in new and room_for_new <= 0)
            if full or len(chosen) >= places.keep or scored.group_id in chosen:
                continue
            room_for_new -= sender in new
            senders[sender] += 1
            sources[source] += 1
            chosen[scored.group_id] = scored
    return list(chosen.values())


MASTERED = 0.5
"""A group teaches nothing if this policy gives one of its rewarded answers, word for word, with at
least this probability.
"""
SHORT = 64
"""Answers of more tokens are not asked about: the policy would have to be almost certain of each.
There the record on their source decides (`services.sampler.pool`).
"""


def rewarded_short(group: TokenGroup) -> TokenGroup:
    """The group's rewarded answers of at most `SHORT` tokens."""
    answers = zip(group.completions, group.advantages, strict=True)
    return group.only([number for number, (ids, advantage) in enumerate(answers) if advantage > 0.0 and len(ids) <= SHORT])


def gives_already(group: TokenGroup, logprobs: Sequence[Tensor]) -> bool:
    """Say whether the policy gives the group's rewarded answers already, from the logprobs of its
    completions' tokens.
    """
    answers = {
        tuple(ids): float(of_tokens.sum())
        for ids, of_tokens, advantage in zip(group.completions, logprobs, group.advantages, strict=False)
        if advantage > 0.0
    }
    return math.fsum(math.exp(min(0.0, each)) for each in answers.values() if math.isfinite(each)) >= MASTERED


# A pretrained model finds almost certain what has been said before, so its mean logprob rates
# repeated text above an honest answer, and the check against the policy lets it pass.

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
