"""The dtypes that settings and commands choose from, by name; torch's are in
`shared.model.loading`.
"""

from __future__ import annotations

from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16"]
AnyDtype = Literal["auto", Dtype]
"""`auto`: what fits the device, or another setting's."""
