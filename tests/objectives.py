"""Builds objectives with the settings that a test gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.token_loss import Normaliser, TokenLoss, token_weights
from shared.config.trainer_section import ObjectiveSection


def configured(objective: str = "grpo", *, max_completion_tokens: int | None = None, **settings: Any) -> ConfiguredObjective:
    """The objective of a configuration with these settings under `[trainer]`."""
    return ConfiguredObjective(ObjectiveSection(objective=objective, **settings), max_completion_tokens)


def step_loss(config: ConfiguredObjective, outcome: TokenLoss, keep: Tensor, counts: Normaliser) -> Tensor:
    """The loss of a step of which these are all tokens: the objective's mean, plus that of the
    divergence where the configuration asks for one.
    """
    return (token_weights(config, keep, counts) * (outcome.loss + config.settings.kl_coefficient * outcome.reference_kl)).sum()
