"""One simulated node: calls the services' ledger, sampler memory, assembly and share controller
directly instead of through streams.

Time is simulated. The services' pure code makes every decision; this file keeps the state that the
processes would keep.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from lab.arms import PlannedNode
from lab.sim_border import SimBorder
from lab.spec import LocalRule
from lab.task_desk import TaskDesk
from services.generator.engines.base import Sample, SamplingParams
from services.generator.groups import rollout_group
from services.generator.ledger import draws_allowed
from services.generator.tasks import PromptedTask
from services.sampler.assembly import Assembly, BatchPlan, compose, taken_of
from services.sampler.memory import SamplerMemory, limits_of
from services.sampler.pool import knowledge_of
from services.sampler.share_controller import Evaluation, Shares, after_batch, next_shares, reconciled
from services.sampler.strategies import strategy_named
from services.trainer.selection.intake import IntakeRules, Window
from shared.contracts.codec import content_id, encode
from shared.contracts.control import TaskLedger, TrainerPosition
from shared.contracts.messages import Batch, BatchItem, ModelIdentity, RolloutGroup, ScoredGroup
from shared.identity.keys import SigningKey
from shared.model.prompts import encode_answer, tokenizer_hash
from shared.rewards import is_informative
from shared.seeds import generator_from, number_from

G = TypeVar("G")


def groups_to_make(rule: LocalRule, local: int, made: Sequence[bool]) -> int:
    """How many more local groups to make this round. `made[i]` says whether group i, already made,
    is informative.

    With informative_until at most I at a time, until I - unfiltered of those after the first
    `unfiltered` are informative, or `max_groups` are made.
    """
    if rule.filter == "none":
        return local - len(made)
    if rule.filter == "informative_of_pool":
        return rule.unfiltered + rule.pool - len(made)
    if not made:
        return min(local, rule.max_groups)
    missing = (local - rule.unfiltered) - sum(made[rule.unfiltered :])
    return max(0, min(missing, local, rule.max_groups - len(made)))


def local_part(rule: LocalRule, groups: Sequence[G], informative: Sequence[bool], local: int, rng: random.Random) -> list[G]:
    """The at most `local` groups to train on: the first `unfiltered`, then informative ones, then
    others if there are too few.
    """
    if rule.filter == "none":
        return list(groups)
    first, rest = list(groups[: rule.unfiltered]), list(range(rule.unfiltered, len(groups)))
    if rule.filter == "informative_of_pool":
        rng.shuffle(rest)
    rest.sort(key=lambda index: not informative[index])
    return [*first, *(groups[index] for index in sorted(rest[: local - len(first)]))]


def groups_to_reuse(rule: LocalRule, earlier: Sequence[tuple[int, G]], round_number: int, rng: random.Random) -> list[G]:
    """Up to `reuse` of the informative `earlier` groups that are no older than `reuse_rounds`. Each
    comes with the round that made it.
    """
    usable = [group for made, group in earlier if made < round_number <= made + rule.reuse_rounds]
    return rng.sample(usable, min(rule.reuse, len(usable)))


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """A group that the node sampled, with its rewards."""

    group: RolloutGroup
    rewards: list[float]

    @property
    def informative(self) -> bool:
        """Whether its rewards differ."""
        return is_informative(self.rewards)


class SimNode:
    """State of one node between rounds."""

    def __init__(
        self, planned: PlannedNode, desk: TaskDesk, key: SigningKey, border: SimBorder, end_token: int, vocabulary: int
    ) -> None:
        config = planned.config
        self.name, self.role, self.config, self.local = planned.name, planned.role, config, planned.local
        self.desk, self.key, self.border = desk, key, border
        self.params = SamplingParams.of(config.generator)
        self.identity = ModelIdentity(name=config.model.public_name, tokenizer_hash=tokenizer_hash(desk.tokenizer))
        self.intake_rules = IntakeRules.of(config, desk.tokenizer, end_token_id=end_token, vocabulary_size=vocabulary)
        # All nodes' rounds are in step, so when a batch is due every node has already sent its
        # groups.
        settings = config.sampler.model_copy(update={"shortage_wait_s": 0.0})
        self._sharing = reconciled(None, config.sampler)
        self._assembly = Assembly(settings, node=config.node.id, seed=config.node.seed)
        self._memory = SamplerMemory(limits_of(config.sampler), strategy_named(settings.strategy).keeps)
        self._payloads: dict[int, ScoredGroup] = {}
        self._seq = 0
        self._next_draw = 0
        self._earlier: list[tuple[int, LocalGroup]] = []
        self.version = 0
        self.evaluation: Evaluation | None = None
        self.earlier_groups: Window = []
        """What its trainer knows about the senders in earlier batches."""

    @property
    def shares(self) -> Shares:
        """I and J of the next batch."""
        return next_shares(self._sharing, self.config.sampler)

    def draws_allowed(self) -> int:
        """How many task draws admission allows now."""
        return draws_allowed(
            TaskLedger(next_draw=self._next_draw),
            groups_per_step=self.shares.local,
            max_staleness=self.config.sampler.max_staleness,
            consumed_local=self._memory.consumed_local,
            dropped_local=self._memory.dropped_local,
        )

    def next_task(self) -> tuple[int, PromptedTask]:
        """The next draw and its task."""
        draw = self._next_draw
        self._next_draw += 1
        return draw, self.desk.task(draw)

    def group(self, draw: int, task: PromptedTask, samples: Sequence[Sample], now_s: float) -> RolloutGroup:
        """The node's group for a draw."""
        return rollout_group(task, samples, node=self.name, draw=draw, model=self.identity, params=self.params, created_at=now_s)

    def encoded(self, text: str) -> list[int]:
        """Token ids of a finished answer, including the end token."""
        return encode_answer(self.desk.tokenizer, text, ended=True, end_token_id=self.intake_rules.end_token_id)

    def take_own(self, own: LocalGroup, now_s: float) -> None:
        """Give a scored local group to the sampler."""
        self.border.note_own(own.group)
        self._observe(self._scored(own, now_s))

    def take_foreign(self, scored: Sequence[ScoredGroup]) -> None:
        """Give the sampler the foreign groups that passed the border."""
        for each in scored:
            self._observe(each)

    def _observe(self, scored: ScoredGroup) -> None:
        self._seq += 1
        self._payloads[self._seq] = scored
        self._memory.observe(self._seq, scored)

    def batch(self, round_number: int, now_s: float) -> Batch | None:
        """The next batch; None if there is nothing to train on."""
        position = TrainerPosition(policy_version=self.version, consumed_local=self._memory.consumed_local)
        plan = self._assembly.decide(
            self._memory.local,
            self._memory.external,
            self._memory.next_number,
            position,
            now_s,
            self._memory.heard_of,
            knowledge_of(self._memory.own),
            self.shares,
            self._memory.replayable,
        )
        if not isinstance(plan, BatchPlan):
            return None
        self._sharing = after_batch(self._sharing, self.config.sampler, self._memory.own, taken_of(plan, now_s), self.evaluation)
        chosen = (*plan.local, *plan.external)
        payloads = {entry.seq: self._payloads[entry.seq] for entry in (*chosen, *plan.replayed)}
        state = self._memory.take(chosen, plan.aged, self._sharing)
        batch = compose(plan, payloads, state, now_s)
        self._memory.advance()
        self._forget()
        return self._with_reused(batch, round_number, now_s)

    def remember(self, round_number: int, own: Sequence[LocalGroup]) -> None:
        """Keep this round's informative groups for `local.reuse`."""
        if self.local.reuse:
            oldest = round_number - self.local.reuse_rounds
            self._earlier = [each for each in self._earlier if each[0] >= oldest]
            self._earlier += [(round_number, group) for group in own if group.informative]

    def _scored(self, own: LocalGroup, now_s: float) -> ScoredGroup:
        return ScoredGroup(
            group_id=content_id(encode(own.group)),
            origin="local",
            group=own.group,
            rewards=own.rewards,
            passed=self.desk.passed(own.group.task.ref, own.rewards),
            scored_by=self.name,
            score_seconds=0.0,
            scored_at=now_s,
        )

    def _with_reused(self, batch: Batch, round_number: int, now_s: float) -> Batch:
        rng = generator_from(f"reuse {self.name} {self.config.node.seed} {round_number}")
        items = []
        for own in groups_to_reuse(self.local, self._earlier, round_number, rng):
            scored = self._scored(own, now_s)
            staleness = batch.number - 1 - own.group.policy_version
            items.append(BatchItem(scored=scored, staleness=staleness, age_s=max(0.0, now_s - own.group.created_at)))
        if not items:
            return batch
        return msgspec.structs.replace(batch, items=[*batch.items, *items])

    def _forget(self) -> None:
        """Release payloads that no pool refers to any longer."""
        memory = self._memory
        held = {entry.seq for pool in (memory.local, memory.external, memory.replayable) for entry in pool}
        if len(self._payloads) > 2 * len(held) + 256:
            self._payloads = {seq: self._payloads[seq] for seq in held}


def call_seed(purpose: str, seed: int, round_number: int) -> int:
    """Random seed for one round, the same in every run with that seed."""
    return number_from(f"lab/{purpose}/{seed}/{round_number}", 4) & 0x7FFFFFFF
