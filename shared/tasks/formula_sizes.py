"""Checks that every part of a formula is large enough to matter when values are compared to about
fifty digits.

`7 + exp(-10**9)` has the value 7 to any number of digits. So no part of an answer may be much
smaller or larger than 1, or than the parts of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]

DIGITS = 15
SLACK = sympy.Float(10) ** 9
"""By which factor a part of the answer may be larger or smaller than 1 and than all parts of the
reference.
"""
PLATEAU = 25
"""From this argument on (or twice the reference's largest) a hyperbolic tangent is practically
1.
"""
MAX_PARTS = 400


def is_seen_as_a_whole(answer: Any, reference: Any, numbers: Mapping[Any, Any]) -> bool:
    """Whether all parts of `answer` are of a size that matters beside those of `reference`, with
    `numbers` as values of the letters.
    """
    sizes = [size for part in _parts(reference) if (size := _size(part, numbers)) is not None and size > 0]
    smallest, largest = min([sympy.Float(1), *sizes]) / SLACK, max([sympy.Float(1), *sizes]) * SLACK
    slopes = [size for part in _parts(reference) if (size := _tangent_argument(part, numbers)) is not None]
    steepest = max([PLATEAU, *(2 * size for size in slopes)])
    parts = list(_parts(answer))
    if len(parts) > MAX_PARTS:
        return False
    for part in parts:
        size, slope = _size(part, numbers), _tangent_argument(part, numbers)
        # The whole has the size of the reference.
        if (
            size is None
            or not (part in (answer, sympy.S.Zero) or smallest <= size <= largest)
            or (slope is not None and slope > steepest)
        ):
            return False
        # sympy treats a sum of numbers as one number: `3 + 10**-20`.
        if part.is_Rational and part.q > SLACK and part.q > SLACK * _largest_denominator(reference):
            return False
    return True


def _parts(formula: Any) -> Iterator[Any]:
    for part in sympy.preorder_traversal(formula):
        if isinstance(part, sympy.Expr) and not part.is_Symbol and not part.is_infinite:
            yield part


def _size(part: Any, numbers: Mapping[Any, Any]) -> Any:
    # None if there is no number: at a pole, or for a letter that the comparison leaves in place.
    value = abs(part.evalf(DIGITS, subs=numbers))
    return value if value.is_Float or value.is_Rational else None


def _tangent_argument(part: Any, numbers: Mapping[Any, Any]) -> Any:
    return _size(part.args[0], numbers) if isinstance(part, sympy.tanh | sympy.coth) else None


def _largest_denominator(formula: Any) -> Any:
    return max([1, *(part.q for part in _parts(formula) if part.is_Rational)])
