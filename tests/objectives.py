"""Builds objectives with the settings that a test gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.token_loss import Normaliser, TokenLoss, token_weights
from shared.config.trainer_section import COMMON_OPTIONS, ObjectiveSection


def configured(objective: str = "grpo", *, max_completion_tokens: int | None = None, **settings: Any) -> ConfiguredObjective:
    """The objective of a configuration with these settings or constants under `[trainer]`."""
    return ConfiguredObjective(ObjectiveSection(objective=objective, **with_options(settings)), max_completion_tokens)


def with_options(trainer: dict[str, Any]) -> dict[str, Any]:
    """The settings of `[trainer]`, with the constants of every objective where they belong."""
    options = {name: value for name, value in trainer.items() if name in COMMON_OPTIONS}
    rest = {name: value for name, value in trainer.items() if name not in options}
    return {**rest, "objective_options": {**rest.get("objective_options", {}), **options}}


def step_loss(config: ConfiguredObjective, outcome: TokenLoss, keep: Tensor, counts: Normaliser) -> Tensor:
    """The loss of a step of which these are all tokens: the objective's mean, plus that of the
    divergence where the configuration asks for one.
    """
    return (token_weights(config, keep, counts) * (outcome.loss + config.settings.kl_coefficient * outcome.reference_kl)).sum()
