"""The groups of a batch that are trained on, in the trainer's tokens, with advantages and each
group's share of the step.

A group that cannot be used, for whatever reason, is left out and counted; so is a foreign one that
exceeds its budget.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.trainer.gradient.bounded_step import mean_of, token_shares
from services.trainer.gradient.rows import TokenGroup
from services.trainer.objectives.advantages import AdvantageConfig, batch_advantages
from services.trainer.selection.group_tokens import (
    GroupTokens,
    PassCost,
    Said,
    SkippedGroup,
    TokenRules,
    answers_present,
    foreign_tokens,
    local_tokens,
    over_budget,
)
from shared.config import NodeConfig
from shared.contracts.messages import Batch, ScoredGroup
from shared.model.prompts import tokenizer_hash
from shared.model.reading import model_max_length
from shared.rewards import mean_parts

Dropped = tuple[str, float]
"""Why an answer is not trained on, and the advantage that it would have had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRules(TokenRules):
    """The trainer's intake limits, besides those of its tokenizer and model.

    max_foreign_advantage: limit of a foreign completion's advantage. usual_tokens: the most tokens
    that a local group can have, prompt excluded. foreign_cost_factor: how much more than usual in
    its batch a foreign group may cost (`selection.group_tokens`). foreign_share_factor: the same
    for the tokens that it counts for in the loss (`gradient.bounded_step`). drop_truncated: leave
    out answers truncated at the length limit. drop_foreign_negatives, drop_local_negatives: leave
    out foreign or local answers with a negative advantage. All of these stay in their group's
    baseline; a group without any answers left is skipped as `truncated` or `negative`.
    """

    external_weight: float = 1.0
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    max_foreign_advantage: float = math.inf
    usual_tokens: int = 0
    foreign_cost_factor: float = math.inf
    foreign_share_factor: float = math.inf
    drop_truncated: bool = False
    drop_foreign_negatives: bool = False
    drop_local_negatives: bool = False

    @classmethod
    def of(
        cls,
        config: NodeConfig,
        tokenizer: Any,
        *,
        end_token_id: int | None,
        end_token_ids: tuple[int, ...] = (),
        vocabulary_size: int,
    ) -> IntakeRules:
        """The intake limits of the node's configuration and model."""
        trainer, generator = config.trainer, config.generator
        return cls(
            tokenizer=tokenizer,
            tokenizer_hash=tokenizer_hash(tokenizer),
            end_token_id=end_token_id,
            end_token_ids=end_token_ids,
            vocabulary_size=vocabulary_size,
            max_length=model_max_length(config.model),
            system_prompt=config.model.system_prompt,
            max_foreign_tokens=config.max_foreign_tokens,
            external_weight=trainer.constants.external_weight,
            advantages=AdvantageConfig.of(config),
            max_foreign_advantage=math.sqrt(max(8, generator.completions) - 1),
            usual_tokens=generator.completions * generator.max_new_tokens,
            foreign_cost_factor=trainer.constants.foreign_cost_factor or math.inf,
            foreign_share_factor=trainer.constants.foreign_share_factor or math.inf,
            drop_truncated=trainer.drop_truncated,
            drop_foreign_negatives=trainer.constants.drop_foreign_negatives,
            drop_local_negatives=trainer.constants.drop_local_negatives,
        )


@dataclass(frozen=True, kw_only=True)
class IntakeRecord:
    """The part of a step's record that its intake knows.

    reward_local: this node's mean reward of its local groups' completions, sampled by its own
    policy; reward_external: its reward for other nodes' completions, without those of the
    `groups_demonstrated` demonstrations, which `groups_external` leaves out too; reward_replayed:
    for those of the `groups_replayed` local groups that were trained on again (`sampler.replay`),
    which `groups_local`, `reward_local` and `staleness_*` leave out. None where the batch had none.
    staleness_*: policy versions, over local groups. foreign_answers_of: foreign answers trained on,
    by node. over_budget_of: whose groups among `skipped` were left out for their cost.
    behaviour_share, reencoded_share: shares of the groups taken in. alike_of: local groups whose
    rewards are all equal: `right`, `wrong`, or `alike` where no pass is defined. cut_off_share: of
    local answers, those that ended at the length limit; answer_tokens: their mean length.
    reward_parts: of several rewards, the mean of each over local answers. bonus_of: local groups
    without a right answer whose rewards differ, by the names of those of several rewards that do.
    """

    reward_local: float | None
    reward_external: float | None
    reward_replayed: float | None = None
    groups_local: int
    groups_external: int
    groups_replayed: int = 0
    groups_demonstrated: int = 0
    groups_zero_advantage: int
    alike_of: dict[str, int] = field(default_factory=dict)
    cut_off_share: float | None = None
    answer_tokens: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    bonus_of: dict[str, int] = field(default_factory=dict)
    groups_skipped: int
    skipped: dict[str, int]
    foreign_answers_of: dict[str, int] = field(default_factory=dict)
    over_budget_of: dict[str, int] = field(default_factory=dict)
    staleness_mean: float | None
    staleness_max: int | None
    staleness_replayed: float | None = None
    behaviour_share: float
    reencoded_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """The groups to train on, and what happened to the rest.

    authors: node and group id of each of `groups`. local, external, replayed: numbers of groups
    trained on; a replayed one, a local group of an earlier batch, does not count as local.
    with_behaviour: groups whose behaviour logprobs are known. reencoded: groups with some text
    encoded here. zero_advantage: groups whose rewards are all equal. skipped: numbers of groups
    left out, by reason. alike_of, reward_parts, bonus_of: as in `IntakeRecord`;
    tokens_local: lengths of local answers; cut_off: how many of them ended at the length limit.
    over_budget_of: foreign groups left out for their cost, by node. rewards_local,
    rewards_external, rewards_replayed: of every completion of the groups trained on. skipped_of:
    why each group was left out, by its id. dropped_of: the same for single answers of groups
    trained on, by group id and index, with their advantage. staleness, staleness_replayed: of the
    batch's local groups, where known.
    demonstrations: ids of those of `groups` that are some; they do not count as external.
    """

    groups: list[TokenGroup]
    authors: list[tuple[str, str]]
    local: int
    external: int
    with_behaviour: int
    reencoded: int
    zero_advantage: int
    skipped: Counter[str]
    rewards_local: list[float]
    rewards_external: list[float]
    over_budget_of: Counter[str] = field(default_factory=Counter)
    alike_of: Counter[str] = field(default_factory=Counter)
    cut_off: int = 0
    tokens_local: list[int] = field(default_factory=list)
    reward_parts: dict[str, float] = field(default_factory=dict)
    bonus_of: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    rewards_replayed: list[float] = field(default_factory=list)
    skipped_of: dict[str, str] = field(default_factory=dict)
    dropped_of: dict[str, dict[int, Dropped]] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    staleness_replayed: list[int] = field(default_factory=list)
    demonstrations: frozenset[str] = frozenset()

    @property
    def foreign_answers_of(self) -> Counter[str]:
        """Number of foreign answers to train on, by node."""
        answers: Counter[str] = Counter()
        for group, (node, _) in zip(self.groups, self.authors, strict=True):
            if not group.is_local and group.completions:
                answers[node] += len(group.completions)
        return answers

    def record(self) -> IntakeRecord:
        """The part of the step's record."""
        taken = max(1, self.local + self.external + self.replayed + len(self.demonstrations))
        return IntakeRecord(
            reward_local=mean_of(self.rewards_local),
            reward_external=mean_of(self.rewards_external),
            reward_replayed=mean_of(self.rewards_replayed),
            groups_local=self.local,
            groups_external=self.external,
            groups_replayed=self.replayed,
            groups_demonstrated=len(self.demonstrations),
            groups_zero_advantage=self.zero_advantage,
            alike_of=dict(sorted(self.alike_of.items())),
            cut_off_share=self.cut_off / len(self.rewards_local) if self.rewards_local else None,
            answer_tokens=mean_of(self.tokens_local),
            reward_parts=self.reward_parts,
            bonus_of=dict(sorted(self.bonus_of.items())),
            groups_skipped=self.skipped.total(),
            skipped=dict(sorted(self.skipped.items())),
            foreign_answers_of=dict(sorted(self.foreign_answers_of.items())),
            over_budget_of=dict(sorted(self.over_budget_of.items())),
            staleness_mean=mean_of(self.staleness),
            staleness_max=max(self.staleness, default=None),
            staleness_replayed=mean_of(self.staleness_replayed),
            behaviour_share=self.with_behaviour / taken,
            reencoded_share=self.reencoded / taken,
        )


@dataclass(frozen=True, slots=True)
class _Taken:
    scored: ScoredGroup
    tokens: GroupTokens
    replayed: bool
    pass_rate: float | None
    """Of a demonstration (`BatchItem.pass_rate`)."""

    @property
    def is_local(self) -> bool:
        return self.scored.origin == "local"

    @property
    def is_fresh(self) -> bool:
        """Say whether the group is local and was in no earlier batch."""
        return self.is_local and not self.replayed

    @property
    def is_external(self) -> bool:
        """Say whether the group is foreign and no demonstration."""
        return not self.is_local and self.pass_rate is None

    @property
    def cost(self) -> PassCost:
        """Positions that a forward pass computes if nothing is shared."""
        lengths = [len(ids) for ids in self.tokens.completions if ids]
        return PassCost(self.scored.group.node, self.is_local, len(self.tokens.prompt_ids) * len(lengths) + sum(lengths))


def _alike(scored: ScoredGroup) -> str:
    """The kind of a group whose rewards are all equal (`IntakeRecord`); empty for any other."""
    if len(set(scored.rewards)) > 1:
        return ""
    if scored.passed is None:
        return "alike"
    return "right" if all(scored.passed) else "wrong"


def _bonus(scored: ScoredGroup) -> str:
    """The names of those of several rewards that differ in a group without a right answer; empty if
    its rewards are equal, and if all of the several differ: then each keeps its weight.
    """
    if scored.passed is None or any(scored.passed) or len(set(scored.rewards)) == 1:
        return ""
    differ = [name for name, values in scored.parts.items() if len(set(values)) > 1]
    return ", ".join(sorted(differ)) if len(differ) < len(scored.parts) else ""


def _cut_off(scored: ScoredGroup) -> int:
    return sum(answer.finish_reason == "length" for answer in scored.group.completions)


def take_in(batch: Batch, rules: IntakeRules) -> Intake:
    """Turn a batch into token groups with advantages, in the batch's order."""
    readable: list[_Taken] = []
    skipped: Counter[str] = Counter()
    skipped_of: dict[str, str] = {}

    def skip(scored: ScoredGroup, reason: str) -> None:
        skipped[reason] += 1
        skipped_of[scored.group_id] = reason

    for item in batch.items:
        try:
            readable.append(_Taken(item.scored, _tokens_of(item.scored, rules), item.replayed, item.pass_rate))
        except SkippedGroup as bad:
            skip(item.scored, bad.reason)
    dropped = over_budget([each.cost for each in readable], rules.usual_tokens, rules.foreign_cost_factor)
    for index, reason in dropped.items():
        skip(readable[index].scored, reason)
    taken, advantages, groups = [], [], []
    dropped_of: dict[str, dict[int, Dropped]] = {}
    affordable = [each for index, each in enumerate(readable) if index not in dropped]
    for each, of_group in zip(affordable, _advantages(affordable, rules), strict=True):
        without: dict[int, str] = {}
        try:
            groups.append(_token_group(each, of_group, rules, without))
        except SkippedGroup as empty:
            skip(each.scored, empty.reason)
            continue
        taken.append(each)
        advantages.append(of_group)
        if without:
            dropped_of[each.scored.group_id] = {place: (reason, of_group[place]) for place, reason in without.items()}
    kept = [len(group.completions) / len(of_group) for group, of_group in zip(groups, advantages, strict=True)]
    shares = token_shares(groups, rules.foreign_share_factor, kept)
    return Intake(
        groups=[group if share == 1.0 else replace(group, share=share) for group, share in zip(groups, shares, strict=True)],
        authors=[(each.scored.group.node, each.scored.group_id) for each in taken],
        local=sum(each.is_fresh for each in taken),
        external=sum(each.is_external for each in taken),
        with_behaviour=sum(all(logprobs is not None for logprobs in each.tokens.behaviour_logprobs) for each in taken),
        reencoded=sum(each.tokens.reencoded for each in taken),
        zero_advantage=sum(not any(of_group) for of_group in advantages),
        skipped=skipped,
        alike_of=Counter(kind for each in taken if each.is_fresh and (kind := _alike(each.scored))),
        cut_off=sum(_cut_off(each.scored) for each in taken if each.is_fresh),
        tokens_local=[answer.token_count for each in taken if each.is_fresh for answer in each.scored.group.completions],
        reward_parts=mean_parts(*(each.scored.parts for each in taken if each.is_fresh)),
        bonus_of=Counter(names for each in taken if each.is_fresh and (names := _bonus(each.scored))),
        rewards_local=[reward for each in taken if each.is_fresh for reward in each.scored.rewards],
        rewards_external=[reward for each in taken if each.is_external for reward in each.scored.rewards],
        replayed=sum(each.replayed for each in taken),
        rewards_replayed=[reward for each in taken if each.replayed for reward in each.scored.rewards],
        over_budget_of=Counter(readable[index].scored.group.node for index in dropped),
        skipped_of=skipped_of,
        dropped_of=dropped_of,
        staleness=_staleness(batch, replayed=False),
        staleness_replayed=_staleness(batch, replayed=True),
        demonstrations=frozenset(each.scored.group_id for each in taken if each.pass_rate is not None),
    )


def _staleness(batch: Batch, *, replayed: bool) -> list[int]:
    return [
        item.staleness
        for item in batch.items
        if item.scored.origin == "local" and item.staleness is not None and item.replayed == replayed
    ]


def _advantages(taken: Sequence[_Taken], rules: IntakeRules) -> list[list[float]]:
    """One number per completion. In a foreign group, answers without tokens have 0 and are not part
    of the others' baseline. In a demonstration, an answer has what its reward is above this node's
    own pass rate, and at least 0.
    """
    counted = [
        list(range(len(each.scored.rewards))) if each.is_local else answers_present(each.tokens.completions) for each in taken
    ]
    found = batch_advantages(
        [
            [each.scored.rewards[index] for index in indices] if each.pass_rate is None else []
            for each, indices in zip(taken, counted, strict=True)
        ],
        rules.advantages,
    )
    bound = rules.max_foreign_advantage
    advantages = []
    for each, indices, of_group in zip(taken, counted, found, strict=True):
        whole = [0.0] * len(each.scored.rewards)
        if each.pass_rate is not None:
            of_group = [max(0.0, each.scored.rewards[index] - each.pass_rate) for index in indices]
        for index, advantage in zip(indices, of_group, strict=True):
            whole[index] = advantage if each.is_local else max(-bound, min(bound, advantage))
        advantages.append(whole)
    return advantages


def _token_group(each: _Taken, advantages: Sequence[float], rules: IntakeRules, without: dict[int, str]) -> TokenGroup:
    """The completions that are trained on; the reasons for leaving out the others are added to
    `without`. Raises SkippedGroup if none is left.
    """
    tokens, completions = each.tokens, each.scored.group.completions
    # A local answer without tokens still counts in its group's baseline, but it has nothing to
    # train on.
    kept = _kept(range(len(completions)), answers_present(tokens.completions), "no_tokens", without)
    if rules.drop_truncated:
        kept = _kept(kept, [index for index in kept if completions[index].finish_reason != "length"], "truncated", without)
        if not kept:
            raise SkippedGroup("truncated")
    if rules.drop_local_negatives if each.is_local else rules.drop_foreign_negatives:
        kept = _kept(kept, [index for index in kept if advantages[index] >= 0.0], "negative", without)
        if not kept:
            raise SkippedGroup("negative")
    return TokenGroup(
        prompt_ids=tokens.prompt_ids,
        completions=[tokens.completions[index] for index in kept],
        behaviour_logprobs=[tokens.behaviour_logprobs[index] for index in kept],
        advantages=[advantages[index] for index in kept],
        is_local=each.is_local,
        replayed=each.replayed,
        weight=1.0 if each.is_local else rules.external_weight,
        text_logprobs=[tokens.text_logprobs[index] for index in kept] if tokens.text_logprobs else (),
        places=kept,
        sampled=[tokens.sampled[index] for index in kept] if tokens.sampled else (),
    )


def _kept(before: Sequence[int], kept: list[int], reason: str, without: dict[int, str]) -> list[int]:
    """`kept`; the members of `before` that are missing from it are recorded under `reason`."""
    without.update(dict.fromkeys(set(before) - set(kept), reason))
    return kept


def _tokens_of(scored: ScoredGroup, rules: IntakeRules) -> GroupTokens:
    group = scored.group
    if scored.failure is not None or len(scored.rewards) != len(group.completions):
        raise SkippedGroup("unscored")
    return (local_tokens if scored.origin == "local" else foreign_tokens)(group, rules, Said.of(scored))
