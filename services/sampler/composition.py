"""Turns a plan into the `Batch` message, and into the input of the controller of J."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from services.sampler.assembly import BatchPlan
from services.sampler.pool import PoolEntry
from services.sampler.share_controller import Taken
from shared.contracts.messages import Batch, BatchItem, ScoredGroup
from shared.contracts.sampler_state import SamplerState

_LONGEST_S = 1e9
"""The limit of `Seconds`; a batch that no reader can decode would stop the node."""


def compose(plan: BatchPlan, payloads: Mapping[int, ScoredGroup], state: SamplerState, now: float) -> Batch:
    """The batch message. `payloads` holds the scored group at each of the plan's positions; `state`
    is the memory after this batch.
    """
    again = {entry.seq for entry in plan.replayed}
    return Batch(
        number=plan.number,
        created_at=now,
        items=[
            BatchItem(
                scored=payloads[entry.seq],
                staleness=entry.staleness(plan.number) if entry.origin == "local" else None,
                age_s=min(entry.age_s(now), _LONGEST_S),
                weight=plan.weights.get(entry.seq) if entry.origin == "external" else None,
                replayed=entry.seq in again,
            )
            for entry in (*plan.local, *plan.external, *plan.replayed)
        ],
        strategy=_explained(plan),
        seed=plan.seed,
        wanted_local=plan.in_force.local,
        wanted_external=plan.in_force.external,
        pool_local=plan.pool_local,
        pool_external=plan.pool_external,
        pool_replay=plan.pool_replay,
        shortage=plan.shortage,
        state=state,
        preference=plan.preference,
    )


def taken_of(plan: BatchPlan, now: float) -> Taken:
    """The batch's use of foreign groups, for the controller that moves J."""
    return Taken(
        wanted=plan.in_force.external,
        taken=min(len(plan.external), plan.in_force.external),
        waited_s=_typical_wait_s(plan.external, now),
        left=plan.pool_external - len(plan.external),
    )


def _typical_wait_s(entries: Sequence[PoolEntry], now: float) -> float:
    """The median over senders of the mean time that their groups have waited here. No sender can
    move it alone or by its claims.
    """
    by_sender: dict[str, list[float]] = {}
    for entry in entries:
        by_sender.setdefault(entry.node, []).append(entry.waited_s(now))
    return statistics.median_low([statistics.fmean(waits) for waits in by_sender.values()]) if by_sender else 0.0


def _explained(plan: BatchPlan) -> str:
    force = plan.in_force
    if plan.node_cap >= force.external:
        return force.explained
    return f"{force.explained}, at most {plan.node_cap} of a node"
