"""A sampler without a server: the pure parts, a scored stream and a batch log as lists, and a crash
whenever one likes.
"""

from __future__ import annotations

from dataclasses import replace

from services.sampler.assembly import Assembly, BatchPlan, Rules, Wait
from services.sampler.bandit import Evaluation
from services.sampler.composition import compose, taken_of
from services.sampler.knowledge import knowledge_of
from services.sampler.memory import Limits, SamplerMemory
from services.sampler.steering import SteeringRules, after_batch, in_force, reconciled
from services.sampler.strategies.uniform import STRATEGY as UNIFORM
from shared.contracts.control import TrainerPosition
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.sampler_state import SamplerState

RULES = Rules(
    local=2,
    external=2,
    shortage="fill_local",
    shortage_wait_s=5.0,
    max_external_age_s=600.0,
    prefetch=1,
    strategy=UNIFORM,
    node_seed=1,
    node_id="alpha",
)


def rules(**changes: object) -> Rules:
    return replace(RULES, **changes)  # type: ignore[arg-type]


def limits(of: Rules, max_staleness: int = 1, pool_local: int = 64, pool_external: int = 64, replay_batches: int = 0) -> Limits:
    in_flight = (max_staleness + 1) * of.local
    return Limits(
        max_staleness=max_staleness,
        pool_local=max(pool_local, in_flight, 1),
        pool_external=max(pool_external, of.external, 1),
        newcomer_share=of.newcomer_share,
        in_flight_local=in_flight,
        replay_batches=replay_batches if of.replay else 0,
    )


def position(trained: int, finished: bool = False) -> TrainerPosition:
    return TrainerPosition(policy_version=trained, consumed_local=0, finished=finished)


class History:
    def __init__(self, rules: Rules, limits: Limits, steering: SteeringRules | None = None) -> None:
        self.rules, self.limits = rules, limits
        self.steering_rules = steering or SteeringRules(local=rules.local, external=rules.external, strategy="uniform")
        self.moved = steering is not None
        self.evaluation: Evaluation | None = None
        self.stream: dict[int, ScoredGroup] = {}
        self.last_seq = 0
        self.batches: list[Batch] = []
        self.trained = 0
        self.now = 1000.0
        self.crash()

    def crash(self) -> None:
        """Forget everything but the two logs, and start again."""
        state = self.batches[-1].state if self.batches else SamplerState()
        self.memory = SamplerMemory(self.limits, self.rules.strategy.keeps, state, len(self.batches) + 1)
        self.assembly = Assembly(self.rules)
        self.steering = reconciled(self.steering_rules, state.steering, len(self.batches) + 1)
        self.memory.skip_to(min(self.stream, default=self.last_seq + 1))
        self.read()

    def read(self) -> None:
        for seq in range(self.memory.cursor + 1, self.last_seq + 1):
            if seq in self.stream:
                self.memory.observe(seq, self.stream[seq])

    def purge(self) -> None:
        if self.batches:
            up_to = self.memory.purgeable_seq(self.batches[-1].state)
            self.stream = {seq: scored for seq, scored in self.stream.items() if seq > up_to}

    def publish(self, scored: ScoredGroup) -> None:
        self.last_seq += 1
        self.stream[self.last_seq] = scored

    def decide(self) -> Wait | BatchPlan:
        memory = self.memory
        return self.assembly.decide(
            memory.local,
            memory.external,
            memory.next_number,
            position(self.trained),
            self.now,
            memory.heard_of,
            knowledge_of(memory.own),
            in_force(self.steering_rules, self.steering) if self.moved else None,
            memory.replayable,
        )

    def step(self) -> Wait | BatchPlan:
        """Read all there is, decide, append."""
        self.read()
        decision = self.decide()
        if isinstance(decision, BatchPlan):
            chosen = (*decision.local, *decision.external)
            self.steering = after_batch(
                self.steering_rules,
                self.steering,
                decision.number,
                own=self.memory.own,
                batch=taken_of(decision, self.now),
                evaluation=self.evaluation,
            )
            state = self.memory.take(chosen, decision.aged, self.steering)
            payloads = {e.seq: self.stream[e.seq] for e in (*chosen, *decision.replayed)}
            self.batches.append(compose(decision, payloads, state, self.now))
            self.memory.advance()
        return decision
