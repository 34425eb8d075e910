"""Objectives with the settings that a test names."""

from __future__ import annotations

from typing import Any

from services.trainer.objectives.config import ConfiguredObjective
from shared.config.objective_section import ObjectiveSection


def configured(objective: str = "grpo", *, max_completion_tokens: int | None = None, **settings: Any) -> ConfiguredObjective:
    """As a configuration with these settings under `[trainer]` has it."""
    return ConfiguredObjective(ObjectiveSection(objective=objective, **settings), max_completion_tokens)
