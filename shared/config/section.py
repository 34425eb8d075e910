"""The base class of all sections of a node's configuration, and the dtypes that settings and
commands choose from, by name; torch's are in `shared.model.loading`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16", "float16"]
AnyDtype = Literal["auto", Dtype]
"""`auto`: what fits the device, or another setting's."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values do not change after loading, and
    numbers are finite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
