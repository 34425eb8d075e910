"""Compares two arms over seeds, beyond `shared.intervals`: ratios, p and their correction, and the
few figures of series that reports need. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shared.intervals import t_quantile

_EXACT_FLIPS = 16


def paired_differences(values: dict[int, float], baseline: dict[int, float]) -> list[float]:
    """`values - baseline` for the seeds that both have."""
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]


def paired_ratios(values: dict[int, float], baseline: dict[int, float]) -> list[float]:
    """`values / baseline` for the seeds that both have; empty if a baseline is not positive,
    because the ratio would be meaningless.
    """
    seeds = sorted(values.keys() & baseline.keys())
    if any(baseline[seed] <= 0.0 for seed in seeds):
        return []
    return [values[seed] / baseline[seed] for seed in seeds]


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of paired differences under "their signs are chance" (exact up to 16 of them,
    else of 2**16 draws).

    It assumes nothing about their distribution. With n differences it is at least 2 / 2**n. Raises
    ValueError if one is not finite.
    """
    if not all(map(math.isfinite, differences)):
        raise ValueError(f"differences {differences} are not all finite, so their signs cannot be compared")
    # A sum that differs from the observed one only by rounding counts as equally extreme.
    observed = abs(math.fsum(differences)) - 1e-9 * math.fsum(map(abs, differences))
    values = np.asarray(differences)
    if len(differences) <= _EXACT_FLIPS:
        numbers = np.arange(2 ** len(differences))
        signs = 1.0 - 2.0 * ((numbers[:, None] >> np.arange(len(differences))) & 1)
        return float(np.mean(np.abs(signs @ values) >= observed))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(2**_EXACT_FLIPS, len(differences)))
    extreme = float(np.sum(np.abs(signs @ values) >= observed))
    return (extreme + 1) / (len(signs) + 1)


def holm(p_values: Mapping[str, float], asked: int | None = None) -> dict[str, float]:
    """Holm's correction (1979) for several comparisons: the smallest p times their number, the next
    times one fewer, and so on, never decreasing.

    asked: how many comparisons were stated, including those without data, which are counted as
    having the largest p. None: as many as there are values.
    """
    number = max(asked or 0, len(p_values))
    corrected: dict[str, float] = {}
    highest = 0.0
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        highest = max(highest, min(1.0, p_values[name] * (number - place)))
        corrected[name] = highest
    return corrected


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two means and its 95 % interval."""

    ratio: float
    low: float
    high: float


def fieller_ratio(values: Sequence[float], baseline: Sequence[float]) -> Ratio | None:
    """The ratio of two means over the same seeds, in the same order, with Fieller's interval
    (1954): all ratios r for which Student's t finds no difference between `values` and r times
    `baseline`.

    None with fewer than two seeds, or if `baseline` itself may be 0 or less: then no finite
    interval holds the ratio.
    """
    seeds = len(values)
    if seeds != len(baseline):
        raise ValueError(f"{seeds} values and {len(baseline)} of the baseline: a ratio needs both for each seed")
    if seeds < 2:
        return None
    above, below = math.fsum(values) / seeds, math.fsum(baseline) / seeds
    covariance = np.cov(values, baseline) * t_quantile(seeds - 1) ** 2 / seeds
    # (above - r below)² = t² (var above - 2 r cov + r² var below): a quadratic in r.
    square, half, rest = below**2 - covariance[1, 1], above * below - covariance[0, 1], above**2 - covariance[0, 0]
    if below <= 0.0 or square <= 0.0:
        return None
    root = math.sqrt(max(0.0, half**2 - square * rest))
    return Ratio(above / below, float((half - root) / square), float((half + root) / square))


def area_under(points: Sequence[tuple[float, float]]) -> float:
    """Integral of y over increasing x by the trapezoidal rule."""
    return math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(points, points[1:], strict=False))


def value_at(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at x, linear between points (x, y), flat beyond their ends."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]
