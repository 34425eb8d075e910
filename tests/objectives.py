"""Builds objectives with the settings that a test gives."""

from __future__ import annotations

from typing import Any

from services.trainer.objectives.config import ConfiguredObjective
from shared.config.objective_section import ObjectiveSection


def configured(objective: str = "grpo", *, max_completion_tokens: int | None = None, **settings: Any) -> ConfiguredObjective:
    """The objective of a configuration with these settings under `[trainer]`."""
    return ConfiguredObjective(ObjectiveSection(objective=objective, **settings), max_completion_tokens)
