"""What the controller of J is told of a batch."""

from __future__ import annotations

from dataclasses import replace

from services.sampler.assembly import BatchPlan, foreign_use
from services.sampler.composition import Composition
from services.sampler.pool import PoolEntry, pool_entry
from tests.unit.sampler_groups import scored_group


def foreign(seq: int, node: str, *, created_at: float, received_at: float) -> PoolEntry:
    made = pool_entry(seq, scored_group(seq, node=node, origin="external"))
    return replace(made, created_at=created_at, received_at=received_at)


def waited_s(*entries: PoolEntry, now: float = 1000.0) -> float:
    plan = BatchPlan(
        number=1,
        local=(),
        external=entries,
        aged=(),
        mastered=(),
        seed=1,
        pool_local=0,
        pool_external=10,
        shortage="none",
        node_cap=6,
        strategy="uniform",
        composition=Composition(local=2, external=6, most_local=8),
        weights={},
        places=None,
    )
    return foreign_use(plan, now).waited_s


def test_what_senders_claim_of_their_groups_age_says_nothing() -> None:
    honest = [foreign(seq, "honest", created_at=980.0, received_at=990.0) for seq in range(2)]
    liars = [foreign(10 + seq, "liar", created_at=400.0, received_at=990.0) for seq in range(4)]
    assert waited_s(*honest, *liars) == 10.0


def test_one_sender_moves_it_no_more_than_any_other_however_much_it_sends() -> None:
    fresh = [foreign(seq, f"node-{seq}", created_at=990.0, received_at=990.0) for seq in range(2)]
    waiting = [foreign(10 + seq, "flood", created_at=410.0, received_at=410.0) for seq in range(4)]
    assert waited_s(*fresh, *waiting) == 10.0
    assert waited_s() == 0.0
