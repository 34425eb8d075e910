"""The part of the configuration that the trainer's pure modules need."""

from __future__ import annotations

import math
from typing import Any

from services.trainer.gradient.bounded_step import InfluenceRules
from services.trainer.gradient.importance import ForeignRules, ImportanceConfig
from services.trainer.gradient.update import UpdateConfig
from services.trainer.objectives.advantages import AdvantageConfig
from services.trainer.objectives.config import configured_objective
from services.trainer.selection.intake import CapabilityRules, IntakeRules
from shared.config import NodeConfig
from shared.model.reading import model_max_length
from shared.model.tokenizer_hash import tokenizer_hash


def _importance_config(config: NodeConfig) -> ImportanceConfig:
    """The importance weights of a node's configuration."""
    trainer = config.trainer
    return ImportanceConfig(
        cap=trainer.importance_cap,
        sequence_bounds=trainer.sequence_mask,
        unknown_behaviour_logprob=trainer.unknown_behaviour_logprob,
        foreign=ForeignRules(
            level=trainer.foreign_weight_level,
            positive=trainer.foreign_weight_positive,
            negative=trainer.foreign_weight_negative,
            negative_divergence=trainer.foreign_negative_divergence,
        ),
    )


def _counts_uninformative(config: NodeConfig) -> bool:
    """Whether groups without advantage count in the means: the configured value, or the objective's
    published choice.
    """
    wanted = config.trainer.count_uninformative
    return configured_objective(config).objective.counts_uninformative if wanted is None else wanted


def _advantage_config(config: NodeConfig) -> AdvantageConfig:
    """The advantages of a node's configuration."""
    trainer, objective = config.trainer, configured_objective(config).objective
    return AdvantageConfig(
        kind=objective.advantages,
        scale=trainer.advantage_scale or objective.scale,
        std_ddof=trainer.advantage_std_ddof,
        std_floor=trainer.advantage_std_floor,
        value_beta=trainer.oapl_value_beta,
        objective=trainer.objective,
    )


def intake_rules(
    config: NodeConfig, tokenizer: Any, *, end_token_id: int | None, end_token_ids: tuple[int, ...] = (), vocabulary_size: int
) -> IntakeRules:
    """The intake limits of the node's configuration and model."""
    trainer, generator = config.trainer, config.generator
    return IntakeRules(
        tokenizer=tokenizer,
        tokenizer_hash=tokenizer_hash(tokenizer),
        end_token_id=end_token_id,
        end_token_ids=end_token_ids,
        vocabulary_size=vocabulary_size,
        max_length=model_max_length(config.model),
        system_prompt=config.model.system_prompt,
        max_foreign_tokens=config.max_foreign_tokens,
        external_weight=trainer.external_weight,
        advantages=_advantage_config(config),
        capability=CapabilityRules(
            window_batches=trainer.foreign_capability_window,
            low=trainer.foreign_capability_bounds[0],
            high=trainer.foreign_capability_bounds[1],
        ),
        max_foreign_advantage=trainer.max_foreign_advantage or math.sqrt(max(8, generator.completions) - 1),
        usual_tokens=generator.completions * generator.max_new_tokens,
        foreign_cost_factor=trainer.foreign_cost_factor or math.inf,
        foreign_share_factor=trainer.foreign_share_factor or math.inf,
        drop_truncated=trainer.drop_truncated,
        drop_foreign_negatives=trainer.drop_foreign_negatives,
        drop_local_negatives=trainer.drop_local_negatives,
    )


def influence_rules(config: NodeConfig) -> InfluenceRules:
    """The limits of a node's configuration on what foreign groups add to a gradient."""
    return InfluenceRules(proportion=config.trainer.foreign_norm_proportion, factor=config.trainer.foreign_norm_factor or math.inf)


def update_config(config: NodeConfig) -> UpdateConfig:
    """The part of a node's configuration that determines the gradient; fields that depend on the
    model and the machine keep their defaults.
    """
    return UpdateConfig(
        objective=configured_objective(config),
        importance=_importance_config(config),
        temperature=config.generator.temperature,
        count_uninformative=_counts_uninformative(config),
    )
