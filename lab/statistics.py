"""Means with intervals over seeds, and the few series computations that reports need. Pure.

A seed is one independent repetition of a whole swarm; nodes of one run share groups and are not independent, so they are averaged
first. With three to five seeds Student's t is the honest interval; a bootstrap over so few would be too narrow.
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
    """A mean over seeds and the half width of its 95 % interval; None where one seed gives none."""

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
    """97.5 % quantile of Student's t; above 30 degrees by its expansion at the normal's, good to 0.001."""
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
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimate(mean, t_quantile(len(values) - 1) * math.sqrt(variance / len(values)), len(values))


def paired_differences(values: dict[int, float], baseline: dict[int, float]) -> list[float]:
    """`values - baseline` of the seeds that both have."""
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]


def paired_ratios(values: dict[int, float], baseline: dict[int, float]) -> list[float]:
    """`values / baseline` of the seeds that both have; empty when a baseline is not positive: a ratio then means nothing."""
    seeds = sorted(values.keys() & baseline.keys())
    if any(baseline[seed] <= 0.0 for seed in seeds):
        return []
    return [values[seed] / baseline[seed] for seed in seeds]


def area_under(points: Sequence[tuple[float, float]]) -> float:
    """Trapezoids under (x, y), x rising."""
    return math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(points, points[1:], strict=False))


def value_at(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at x, linear between points (x, y), flat beyond their ends."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]


def oscillation(points: Sequence[tuple[float, float]], last: float = 0.25) -> float | None:
    """Standard deviation of y about its straight line over the last part of x; None with fewer than four points there."""
    if not points:
        return None
    begin = points[-1][0] - last * (points[-1][0] - points[0][0])
    part = [(x, y) for x, y in points if x >= begin]
    if len(part) < 4:
        return None
    mean_x = math.fsum(x for x, _ in part) / len(part)
    mean_y = math.fsum(y for _, y in part) / len(part)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in part)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in part) / spread
    rest = [y - mean_y - slope * (x - mean_x) for x, y in part]
    return math.sqrt(math.fsum(value**2 for value in rest) / (len(part) - 2))


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over at most `window` values."""
    result, total = [], 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        result.append(total / min(index + 1, window))
    return result
