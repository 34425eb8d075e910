"""The base class of all sections of a node's configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values do not change after loading, and
    numbers are finite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
