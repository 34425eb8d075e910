"""The part of the configuration that the sampler's pure modules need."""

from __future__ import annotations

from services.sampler.memory import Limits
from services.sampler.steering import SteeringRules
from shared.config import NodeConfig


def steering_rules_of(config: NodeConfig) -> SteeringRules:
    """What moves I, J and the strategy, if anything does. Raises ValueError if a strategy cannot be
    loaded.
    """
    return SteeringRules(config.sampler, seed=f"{config.node.seed}\x00{config.node.id}")


def limits_of(config: NodeConfig) -> Limits:
    """The settings of the memory. A pool holds at least one batch plus the groups that the
    generator may have in progress, even if a smaller size is configured; otherwise local groups
    would be discarded and generated again for ever.
    """
    sampler = config.sampler
    most_local = sampler.local + (sampler.external if sampler.adapt == "adaptive" else 0)
    in_flight = (sampler.max_staleness + 1) * most_local
    return Limits(
        max_staleness=sampler.max_staleness,
        pool_local=max(sampler.pool_local, in_flight, 1),
        pool_external=max(sampler.pool_external, sampler.external, 1),
        newcomer_share=sampler.newcomer_share,
        in_flight_local=in_flight,
        replay_batches=sampler.replay_batches if sampler.replay else 0,
    )
