"""Means over seeds with Student's interval, and how many seeds would show a mean. Pure.

A seed is one independent repetition of a whole swarm; nodes of one run share groups and are not
independent, so they are averaged first. With few seeds Student's t is the honest interval; a
bootstrap over so few would be too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % quantile of Student's t for 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and the half width of its 95 % interval; None with a single seed."""

    mean: float
    half_width: float | None
    n: int

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half_width is None else self.mean + self.half_width


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t; above 30 degrees by its expansion at the normal's, good to
    0.001.
    """
    if degrees < 1:
        raise ValueError("Student's t needs at least one degree of freedom")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values: a mean needs at least one seed")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, t_quantile(len(values) - 1) * _deviation(values, mean) / math.sqrt(len(values)), len(values))


def seeds_needed(values: Sequence[float], most: int) -> int | None:
    """The fewest seeds whose interval would leave out 0, if their mean and standard deviation were
    those of `values`; None if that takes more than `most`.
    """
    mean = math.fsum(values) / len(values)
    deviation = _deviation(values, mean)
    enough = (n for n in range(2, most + 1) if t_quantile(n - 1) * deviation / math.sqrt(n) < abs(mean))
    return next(enough, None)


def _deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
