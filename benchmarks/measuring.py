"""Measures two ways to do the same work in turns, and checks their ratio against a bar."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"    {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table.

    ratios: one for each pair of turns. direction: whether the bar is the minimum or the maximum of
    the ratio. product, plain: medians of both sides in `unit`. remarks: what the reader must know
    to judge the number.
    """

    row: str
    measured: str
    against: str
    workload: str
    unit: str
    ratios: list[float]
    bar: float
    direction: Literal["at least", "at most"]
    product: float
    plain: float | None
    remarks: list[str]

    @property
    def ratio(self) -> float:
        """The median, which is compared with the bar."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool:
        """Whether the median meets the bar."""
        return self.ratio >= self.bar if self.direction == "at least" else self.ratio <= self.bar

    def to_builtins(self) -> dict[str, Any]:
        """The result in plain types, to be passed from a row's process to the table."""
        return asdict(self)


def quotients(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of each pair of turns. The two turns of a pair follow each other, so that a
    slowdown of the machine affects both.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} turns of one side and {len(denominators)} of the other: give one of each per pair")
    if min(denominators) <= 0.0 or min(numerators) < 0.0:
        raise ValueError("a turn measured nothing: make its workload larger")
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


async def in_turns(
    product: Callable[[int], Awaitable[float]], plain: Callable[[int], Awaitable[float]], *, pairs: int, warm_up: int = 1
) -> tuple[list[float], list[float]]:
    """Both sides' numbers, measured in the order A B, B A, A B, ... after `warm_up` pairs that do
    not count. Both sides are called with the pair's number.
    """
    ours: list[float] = []
    theirs: list[float] = []
    for pair in range(-warm_up, pairs):
        first_is_product = pair % 2 == 0
        for is_product in (first_is_product, not first_is_product):
            started = time.monotonic()
            number = await (product if is_product else plain)(pair + warm_up)
            side = "product" if is_product else "plain"
            label = "warm-up" if pair < 0 else f"pair {pair + 1}/{pairs}"
            say(f"{label}: {side} {number:.4g} ({time.monotonic() - started:.1f} s)")
            if pair >= 0:
                (ours if is_product else theirs).append(number)
    return ours, theirs
