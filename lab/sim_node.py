"""One simulated node: calls the services' ledger, sampler memory, assembly and share controller
directly instead of through streams.

Time is simulated. The services' pure code makes every decision; this file keeps the state that the
processes would keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from lab.arms import PlannedNode
from lab.policy import Policy
from lab.sim_border import SimBorder, SwarmMessage
from lab.task_desk import TaskDesk
from services.generator.engines.base import Sample, SamplingParams
from services.generator.groups import rollout_group
from services.generator.ledger import draws_allowed
from services.generator.tasks import PromptedTask
from services.sampler.assembly import Assembly, BatchPlan, compose, foreign_use, groups_wanted
from services.sampler.composition import Composition, HeldOutResult, after_batch, next_composition, reconciled
from services.sampler.memory import SamplerMemory, memory_limits
from services.sampler.pool import knowledge_of
from services.sampler.strategies import strategy_named
from services.verifier.rewards import foreign_rewards
from services.verifier.swarm_reader import MARGIN
from shared.contracts.codec import content_id, encode
from shared.contracts.control import TaskLedger, TrainerPosition
from shared.contracts.messages import Batch, RolloutGroup, ScoredGroup
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey
from shared.model.prompts import encode_answer, tokenizer_hash
from shared.rewards import is_informative
from shared.seeds import number_from


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

    def __init__(self, planned: PlannedNode, desk: TaskDesk, key: SigningKey, border: SimBorder, policy: Policy) -> None:
        """`policy`: its own, or for a hostile node an honest node's."""
        config = planned.config
        self.name, self.role, self.config = planned.name, planned.role, config
        self.desk, self.key, self.border, self.policy = desk, key, border, policy
        self.params = SamplingParams.of(config.generator)
        self.identity = ModelIdentity(name=config.model.public_name, tokenizer_hash=tokenizer_hash(desk.tokenizer))
        # All nodes' rounds are in step, so when a batch is due every node has already sent its
        # groups.
        settings = config.sampler.model_copy(update={"shortage_wait_s": 0.0})
        self._sharing = reconciled(None, config.sampler)
        self._assembly = Assembly(settings, node=config.node.id, seed=config.node.seed)
        self._memory = SamplerMemory(memory_limits(config.sampler), strategy_named(settings.strategy).keeps)
        self._payloads: dict[int, ScoredGroup] = {}
        self._seq = 0
        self._next_draw = 0
        self.version = 0
        self.evaluation: HeldOutResult | None = None

    @property
    def composition(self) -> Composition:
        """I and J of the next batch."""
        return next_composition(self._sharing, self.config.sampler)

    def draws_allowed(self) -> int:
        """How many task draws admission allows now."""
        return draws_allowed(
            TaskLedger(next_draw=self._next_draw),
            groups_per_step=self.composition.local,
            max_staleness=self.config.sampler.max_staleness,
            consumed_local=self._memory.consumed_local,
            dropped_local=self._memory.dropped_local,
        )

    def make(self, count: int, seed: int, version: int, now_s: float) -> list[LocalGroup]:
        """Groups for its next `count` draws, sampled from its policy and scored."""
        draws = range(self._next_draw, self._next_draw + count)
        self._next_draw += count
        tasks = [self.desk.task(draw) for draw in draws]
        prompts = [task.prompt_ids for task in tasks]
        answers = self.policy.sample(prompts, self.config.generator.completions, self.params, seed=seed, version=version)
        return [self._local_group(draw, *made, now_s) for draw, made in zip(draws, zip(tasks, answers, strict=True), strict=True)]

    def _local_group(self, draw: int, task: PromptedTask, samples: Sequence[Sample], now_s: float) -> LocalGroup:
        group = rollout_group(task, samples, node=self.name, draw=draw, model=self.identity, params=self.params, created_at=now_s)
        return LocalGroup(group, self.desk.score(task.task.ref, [sample.text for sample in samples]))

    def rewards_elsewhere(self, own: LocalGroup) -> list[float]:
        """What the answers count for at other nodes, where a near miss is a wrong answer."""
        passed = self.desk.passed(own.group.task.ref, own.rewards)
        return (
            own.rewards if passed is None or self.config.verifier.foreign_partial_credit else foreign_rewards(own.rewards, passed)
        )

    def encoded(self, text: str) -> list[int]:
        """Token ids of a finished answer, including the end token."""
        return encode_answer(self.desk.tokenizer, text, ended=True, end_token_id=self.policy.rules.end_token_id)

    def read(self, messages: Sequence[SwarmMessage], seed: int, now_s: float) -> list[SwarmMessage]:
        """Those of a round's messages that the node reads: what its next batches lack and a margin,
        as a random sample.
        """
        sampler = self.config.sampler
        knowledge = knowledge_of(self._memory.own)
        groups = groups_wanted(self._memory.external, self.composition, sampler, now_s, knowledge)
        foreign = [number for number, message in enumerate(messages) if message.sender != self.name]
        most = min(len(foreign), math.ceil(groups * MARGIN))
        return [messages[number] for number in sorted(Random(seed).sample(foreign, most))]

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

    def batch(self, now_s: float) -> Batch | None:
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
            self.composition,
            self._memory.replayable,
        )
        if not isinstance(plan, BatchPlan):
            return None
        self._sharing = after_batch(self._sharing, self.config.sampler, self._memory.own, foreign_use(plan, now_s), self.evaluation)
        chosen = (*plan.local, *plan.external)
        payloads = {entry.seq: self._payloads[entry.seq] for entry in (*chosen, *plan.replayed)}
        state = self._memory.take(chosen, plan.aged, self._sharing, plan.mastered)
        batch = compose(plan, payloads, state, now_s)
        self._memory.advance()
        self._forget()
        return batch

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

    def _forget(self) -> None:
        """Release payloads that no pool refers to any longer."""
        memory = self._memory
        held = {entry.seq for pool in (memory.local, memory.external, memory.replayable) for entry in pool}
        if len(self._payloads) > 2 * len(held) + 256:
            self._payloads = {seq: self._payloads[seq] for seq in held}


def call_seed(purpose: str, seed: int, round_number: int) -> int:
    """Random seed for one round, the same in every run with that seed."""
    return number_from(f"lab/{purpose}/{seed}/{round_number}", 4) & 0x7FFFFFFF
