"""Holds the numbers that code of an installed package returns to what was asked for."""

from __future__ import annotations

import math
from typing import Any


def finite_numbers(found: Any, count: int) -> list[float]:
    """`found`, of which nothing is taken for granted, as `count` finite numbers.

    Raises:
        ValueError: it is something else; the message says what, to follow "returned".
    """
    try:
        numbers = [float(each) for each in found]
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"a {type(found).__name__}, which is no list of numbers ({error})") from None
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers where {count} are needed")
    if wrong := [number for number in numbers if not math.isfinite(number)]:
        raise ValueError(f"the number {wrong[0]}, which is not finite")
    return numbers
