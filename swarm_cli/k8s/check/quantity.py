"""Kubernetes' quantities: `250m`, `1536Mi`, `8`, `2e3`."""

from __future__ import annotations

import re

_SUFFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIXES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", 1)}


def quantity(text: object) -> float:
    """The value of a quantity. Raises ValueError for anything else."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTP]?|[KMGTP]i)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    return float(found[1]) * _SUFFIXES[found[2]]


def shown(resource: str, amount: float) -> str:
    """An amount for display."""
    if "memory" in resource or "storage" in resource:
        return f"{amount / 2**30:.0f} GiB"
    return f"{amount:g}"
