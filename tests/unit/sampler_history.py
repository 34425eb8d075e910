"""A sampler without a server: the pure parts, a scored stream and a batch log as lists, and a crash
whenever one likes.
"""

from __future__ import annotations

from services.sampler.assembly import Assembly, BatchPlan, Wait, compose, foreign_use
from services.sampler.composition import HeldOutResult, after_batch, next_composition, reconciled
from services.sampler.memory import MemoryLimits, SamplerMemory
from services.sampler.pool import knowledge_of
from services.sampler.strategies import strategy_named
from shared.config.sampler_section import SamplerSection
from shared.contracts.control import TrainerPosition
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.sampler_state import SamplerState
from tests.constants import section_with, split

DEFAULTS = {
    "local": 2,
    "external": 2,
    "strategy": "uniform",
    "shortage": "fill_local",
    "shortage_wait_s": 5.0,
    "max_external_age_s": 600.0,
    "prefetch": 1,
    "max_share_per_node": 1.0,
    "newcomer_share": 1.0,
    "max_staleness": 1,
    "oversample": 1.0,
    "replay": 0,
}


def sampler(**changes: object) -> SamplerSection:
    """A `[sampler]` section under which nothing but what a test names holds groups back."""
    settings, constants = split(SamplerSection, {**DEFAULTS, **changes})
    return section_with(SamplerSection(**settings), constants)


def limits(
    of: SamplerSection, max_staleness: int = 1, pool_local: int = 64, pool_external: int = 64, replay_batches: int = 0
) -> MemoryLimits:
    in_flight = (max_staleness + 1) * of.local
    return MemoryLimits(
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
    def __init__(self, settings: SamplerSection, limits: MemoryLimits, moving: SamplerSection | None = None) -> None:
        """moving: the settings by which I and J move; None: they do not."""
        self.settings, self.limits = settings, limits
        self.moving = moving or settings.model_copy(update={"adapt": "off"})
        self.evaluation: HeldOutResult | None = None
        self.stream: dict[int, ScoredGroup] = {}
        self.last_seq = 0
        self.batches: list[Batch] = []
        self.trained = 0
        self.now = 1000.0
        self.crash()

    def crash(self) -> None:
        """Forget everything but the two logs, and start again."""
        state = self.batches[-1].state if self.batches else SamplerState()
        self.memory = SamplerMemory(self.limits, strategy_named(self.settings.strategy).keeps, state, len(self.batches) + 1)
        self.assembly = Assembly(self.settings, node="alpha", seed=1)
        self.sharing = reconciled(state.sharing, self.moving)
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
            next_composition(self.sharing, self.moving) if self.sharing is not None else None,
            memory.replayable,
        )

    def step(self) -> Wait | BatchPlan:
        """Read all there is, decide, append."""
        self.read()
        decision = self.decide()
        if isinstance(decision, BatchPlan):
            chosen = (*decision.local, *decision.external, *decision.demonstrations)
            taken = foreign_use(decision, self.now)
            self.sharing = after_batch(self.sharing, self.moving, self.memory.own, taken, self.evaluation)
            state = self.memory.take(chosen, decision.aged, self.sharing, decision.mastered)
            payloads = {e.seq: self.stream[e.seq] for e in (*chosen, *decision.replayed)}
            self.batches.append(compose(decision, payloads, state, self.now))
            self.memory.advance()
        return decision
