"""A node in small: the sampler's pure parts, a generator that admission paces, a trainer, a swarm.
No server, no model.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from services.generator.ledger import consumed_with_moving_i, draws_allowed
from services.sampler.assembly import BatchPlan
from services.sampler.composition import HeldOutResult, next_composition
from shared.contracts.control import SamplerPosition, TaskLedger
from tests.constants import section_with
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, sampler


@dataclass(kw_only=True)
class World:
    """What is not the sampler's to decide, as chances per tick.

    late: that a finished group waits behind a younger one. hears_late: that the generator does not
    hear of the sampler's position. informative, fails: of local groups. foreign: that a foreign
    group comes. trains: that the trainer takes its next step.
    """

    seed: int
    local: int = 4
    external: int = 4
    period: int = 4
    max_staleness: int = 1
    prefetch: int = 1
    shortage: str = "fill_local"
    shortage_wait_s: float = 5.0
    late: float = 0.0
    hears_late: float = 0.0
    informative: float = 0.5
    fails: float = 0.0
    foreign: float = 1.0
    trains: float = 0.5
    crashes: float = 0.0
    replay: int = 0
    drops: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        chosen = sampler(
            local=self.local,
            external=self.external,
            shortage=self.shortage,
            prefetch=self.prefetch,
            max_staleness=self.max_staleness,
            shortage_wait_s=self.shortage_wait_s,
            replay=self.replay,
        )
        self.groups = self.local + self.external
        moving = chosen.model_copy(update={"adapt": "adaptive", "max_external_age_s": 600.0})
        moving = section_with(moving, {"adapt_period": self.period, "adapt_informative": (0.2, 0.6)})
        self.moving = moving
        most = sampler(local=self.groups, replay=self.replay)
        bounds = limits(most, self.max_staleness, pool_local=1, pool_external=64, replay_batches=3)
        self.history = History(chosen, bounds, moving)
        self.claimed = 0
        self.in_flight: list[tuple[int, int]] = []
        self.heard = self._position()
        self.evaluation: HeldOutResult | None = None

    @property
    def external_in_force(self) -> int:
        return next_composition(self.history.sharing, self.moving).external

    def tick(self) -> None:
        """A moment in which everybody does a little."""
        history, rng = self.history, self.rng
        if rng.random() >= self.hears_late:
            self.heard = self._position()
        groups_per_step = self.heard.local or self.local
        allowed = draws_allowed(
            TaskLedger(next_draw=self.claimed),
            groups_per_step=groups_per_step,
            max_staleness=self.max_staleness,
            consumed_local=consumed_with_moving_i(self.heard, groups_per_step=groups_per_step, version=history.trained),
            dropped_local=self.heard.dropped_local,
        )
        for _ in range(min(allowed, 4)):
            self.in_flight.append((self.claimed, history.trained))
            self.claimed += 1
        for _ in range(4):
            if self.in_flight and rng.random() >= self.late:
                self._finish(*self.in_flight.pop(rng.randrange(len(self.in_flight)) if self.late else 0))
        if rng.random() < self.foreign:
            history.publish(scored_group(history.last_seq, node=f"n{rng.randrange(3)}", origin="external", created_at=history.now))
        history.evaluation = self.evaluation
        while isinstance(history.step(), BatchPlan):
            pass
        for (origin, reason), count in history.memory.drops.items():
            self.drops[f"{origin} {reason}"] += count
        history.memory.drops.clear()
        if history.trained < len(history.batches) and rng.random() < self.trains:
            history.trained += 1
        history.now += 1.0
        if rng.random() < self.crashes:
            history.crash()

    def run(self, batches: int, most_ticks: int = 6000) -> None:
        """Until so many batches are trained on, or time is over."""
        wanted = self.history.trained + batches
        for _ in range(most_ticks):
            if self.history.trained >= wanted:
                return
            self.tick()

    def _position(self) -> SamplerPosition:
        memory = self.history.memory
        return SamplerPosition(
            batch_number=memory.next_number - 1,
            consumed_local=memory.consumed_local,
            dropped_local=memory.dropped_local,
            local=next_composition(self.history.sharing, self.moving).local,
        )

    def _finish(self, draw: int, version: int) -> None:
        rng = self.rng
        rewards = (0.0, 1.0) if rng.random() < self.informative else (0.0, 0.0)
        failure = "timeout" if rng.random() < self.fails else None
        self.history.publish(scored_group(draw, version=version, rewards=rewards, failure=failure, created_at=self.history.now))
