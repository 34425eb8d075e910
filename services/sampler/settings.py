"""What the sampler's pure parts need of the configuration."""

from __future__ import annotations

from services.sampler.assembly import Rules
from services.sampler.memory import Limits
from services.sampler.share_controller import SharingRules
from services.sampler.steering import SteeringRules
from services.sampler.strategies import strategy_named
from shared.config import NodeConfig
from shared.config.sampler_section import BANDIT


def rules_of(config: NodeConfig) -> Rules:
    """What the assembly needs."""
    sampler = config.sampler
    return Rules(
        local=sampler.local,
        external=sampler.external,
        shortage=sampler.shortage,
        shortage_wait_s=sampler.shortage_wait_s,
        max_external_age_s=sampler.max_external_age_s,
        prefetch=sampler.prefetch,
        strategy=strategy_named("uniform" if sampler.strategy == BANDIT else sampler.strategy),
        node_seed=config.node.seed,
        node_id=config.node.id,
        max_share_per_node=sampler.max_share_per_node,
        newcomer_share=sampler.newcomer_share,
        max_staleness=sampler.max_staleness,
        oversample=sampler.oversample,
        replay=sampler.replay,
    )


def steering_rules_of(config: NodeConfig) -> SteeringRules:
    """What moves I, J and the strategy, if anything does."""
    sampler = config.sampler
    few, enough = sampler.adapt_informative
    moving = SharingRules(
        most_external=sampler.external,
        period_batches=sampler.adapt_period,
        few_informative=few,
        enough_informative=enough,
        max_age_s=sampler.max_external_age_s,
    )
    return SteeringRules(
        local=sampler.local,
        external=sampler.external,
        strategy=sampler.strategy,
        arms=tuple(sampler.bandit_arms) if sampler.strategy == BANDIT else (),
        sharing=moving if sampler.adapt == "adaptive" and sampler.external else None,
        seed=f"{config.node.seed}\x00{config.node.id}",
    )


def limits_of(config: NodeConfig) -> Limits:
    """What the memory needs. A pool holds a batch, and what the generator may have out, whatever
    smaller size is configured:
    else local groups would be thrown away and made again for ever."""
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
