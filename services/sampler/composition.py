"""Turn a plan and the payloads it names into the `Batch` message."""

from __future__ import annotations

from collections.abc import Mapping

from services.sampler.assembly import BatchPlan, Rules
from shared.messages import Batch, BatchItem, SamplerState, ScoredGroup

_LONGEST_S = 1e9
"""What `Seconds` allows: a batch that no reader can decode would stop the node."""


def compose(plan: BatchPlan, payloads: Mapping[int, ScoredGroup], state: SamplerState, rules: Rules, now: float) -> Batch:
    """The batch message. `payloads` holds the scored group at each of the plan's positions; `state` is the memory after it."""
    return Batch(
        number=plan.number,
        created_at=now,
        items=[
            BatchItem(
                scored=payloads[entry.seq],
                staleness=entry.staleness(plan.number) if entry.origin == "local" else None,
                age_s=min(entry.age_s(now), _LONGEST_S),
            )
            for entry in (*plan.local, *plan.external)
        ],
        strategy=_explained(plan, rules),
        seed=plan.seed,
        wanted_local=rules.local,
        wanted_external=rules.external,
        pool_local=plan.pool_local,
        pool_external=plan.pool_external,
        shortage=plan.shortage,
        state=state,
    )


def _explained(plan: BatchPlan, rules: Rules) -> str:
    if plan.node_cap >= rules.external:
        return rules.strategy.name
    return f"{rules.strategy.name}, at most {plan.node_cap} of a node"
