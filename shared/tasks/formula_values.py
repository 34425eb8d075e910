"""Checks whether two formulas have the same values: exactly for arithmetic, to about fifty digits
if functions are involved.

Formulas with letters are compared at points derived from a hash of the answer. So nobody can write
an answer that is right only at those points, while all nodes still compute the same reward. Each
value costs a bounded number of operations.

`7 + exp(-10**9)` has the value 7 to any number of digits. So no part of an answer may be much
smaller or larger than 1, or than the parts of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]

from shared.seeds import bytes_from

POINTS = 8
ENOUGH_POINTS = 3
SCALES = (Fraction(1), Fraction(1, 4), Fraction(8))
"""Sizes of the points. Further ones follow while too few values are real: `arcsin x` has none
beyond 1, `ln(x - 5)` none below 5.
"""
DIGITS = 60
SIZE_DIGITS = 15
TOLERANCE = sympy.Float(10, DIGITS) ** -50
MAX_BITS = 200_000
"""Largest exact numerator or denominator in bits; larger values are not computed."""
SLACK = sympy.Float(10) ** 9
"""By which factor a part of the answer may be larger or smaller than 1 and than all parts of the
reference.
"""
MAX_PARTS = 400


def exact_value(side: Any, values: Mapping[str, Fraction]) -> Fraction | None:
    """The value of sums, products and integer powers of rationals; None for anything else, or
    beyond `MAX_BITS`.

    Raises:
        ZeroDivisionError: a division by zero.
    """
    if side.is_Symbol:
        return values[side.name]
    if side.is_Float:
        # Converted through text, so that 0.1 is a tenth.
        return Fraction(str(side))
    if side.is_Rational:
        return Fraction(int(side.p), int(side.q))
    if not (side.is_Add or side.is_Mul or side.is_Pow):
        return None
    parts = [exact_value(part, values) for part in side.args]
    found = Fraction(0 if side.is_Add else 1)
    if side.is_Pow:
        base, exponent = parts
        if base is None or exponent is None or exponent.denominator != 1:
            return None
        if _bits(base) * abs(exponent) > MAX_BITS:
            return None
        return Fraction(base**exponent.numerator)
    for part in parts:
        if part is None or _bits(found) + _bits(part) > MAX_BITS:
            return None
        found = found + part if side.is_Add else found * part
    return found


def same_values(left: Any, right: Any, seed: str) -> bool | None:
    """Check whether two sympy expressions agree; None if no value of the first is known. `seed`
    selects the points.
    """
    if is_tame(left) and not is_tame(right):
        return False
    names = sorted({symbol.name for symbol in left.free_symbols | right.free_symbols})
    agreed: list[bool] = []
    real: list[bool] = []
    for place, values in enumerate(_points(names, seed)):
        if place % POINTS == 0 and sum(real) >= ENOUGH_POINTS:
            break
        try:
            pair = [exact_value(side, values) for side in (left, right)]
        except ZeroDivisionError:
            continue
        if None not in pair:
            is_same, is_real = pair[0] == pair[1], [True, True]
        else:
            sides = [_evaluated(side, values) for side in (left, right)]
            is_real = [side.is_real is True for side in sides]
            if not all(side.is_number and side.is_finite for side in sides):
                continue
            # `ln x` lacks what `ln |x|` says of negative values. An answer with a value where the
            # reference has none is not asked about there.
            if is_real == [True, False] and _has_imaginary_part(sides[1]) and not _has_odd_root(right):
                return False
            is_same = _agree(*sides)
        if not is_same and (all(is_real) or not names):
            return False
        if None in pair and not is_seen_as_a_whole(right, left, _numbers(left, right, values)):
            return False
        agreed.append(is_same)
        real.append(all(is_real))
        if not names:
            return True
    if sum(real) >= ENOUGH_POINTS:
        return True
    # Formulas that are real nowhere (roots of negative values) are compared as complex numbers.
    if any(real):
        return False
    return all(agreed) if len(agreed) >= ENOUGH_POINTS else None


def _has_imaginary_part(value: Any) -> bool:
    return bool(abs(sympy.im(value)) > abs(value) * TOLERANCE)


def _has_odd_root(side: Any) -> bool:
    """Check for a root such as `x^{2/3}`, which many read as real for negative values too."""
    return any(power.exp.is_Rational and power.exp.q % 2 and power.exp.q > 1 for power in side.atoms(sympy.Pow))


def _agree(one: Any, other: Any) -> bool:
    """Check whether two values are the same to about fifty digits. `e^{-200}` is neither 0 nor
    `e^{-201}`, however small. A sum that cancels has no known digit, and counts as 0.
    """
    if not all(side.is_Rational or side.is_Float for side in (one, other)):
        return bool(abs(one - other) <= (1 + abs(one)) * TOLERANCE)
    one, other = (side if side.is_Rational or side._prec > 1 else sympy.S.Zero for side in (one, other))
    return bool(abs(one - other) <= max(abs(one), abs(other)) * TOLERANCE)


def is_tame(side: Any) -> bool:
    """Check whether no exponential or sine is taken of an exponential: its value may have more
    digits than a machine has memory.
    """
    growing = [node for node in sympy.preorder_traversal(side) if _is_exponential(node) or isinstance(node, sympy.Function)]
    outer = [node for node in growing if not isinstance(node, sympy.log)]
    return not any(any(map(_is_exponential, sympy.preorder_traversal(part))) for node in outer for part in node.args)


def _is_exponential(node: Any) -> bool:
    if isinstance(node, sympy.Pow):
        return not node.exp.is_Number
    return isinstance(node, sympy.exp | sympy.sinh | sympy.cosh)


def _points(names: list[str], seed: str) -> Iterator[dict[str, Fraction]]:
    # Every other point is positive in all letters, for logarithms and roots. Each letter, and each
    # product of two of the first four, is negative at another one, so that `|xy|` is not `xy`. The
    # denominators follow from the hash, so nobody can choose a formula that vanishes at them, as
    # `sin(2**23*pi*x)` does at binary fractions.
    for place in range(POINTS * len(SCALES) if names else 1):
        values, scale = {}, SCALES[place // POINTS]
        for number, name in enumerate(names):
            digest = bytes_from(f"{place}:{name}:{seed}")
            word, divisor = int.from_bytes(digest[:6], "big"), int.from_bytes(digest[6:12], "big") | 2**47 | 1
            size = (Fraction(1, 8) + Fraction(2 * word, divisor)) * scale
            is_negative = {1: True, 3: number & 1, 5: number & 2}.get(place % POINTS, digest[12] >> 7)
            values[name] = -size if place % 2 and is_negative else size
        yield values


def _evaluated(side: Any, values: Mapping[str, Fraction]) -> Any:
    rationals = {item: sympy.Rational(str(item)) for item in side.atoms(sympy.Float)}
    return side.xreplace(rationals).evalf(DIGITS, subs=_numbers(side, side, values))


def _numbers(left: Any, right: Any, values: Mapping[str, Fraction]) -> dict[Any, Any]:
    symbols = left.free_symbols | right.free_symbols
    return {symbol: sympy.Rational(*values[symbol.name].as_integer_ratio()) for symbol in symbols}


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def is_seen_as_a_whole(answer: Any, reference: Any, numbers: Mapping[Any, Any]) -> bool:
    """Check whether all parts of `answer` are of a size that matters beside those of `reference`,
    with `numbers` as values of the letters.
    """
    sizes = [size for part in _parts(reference) if (size := _size(part, numbers)) is not None and size > 0]
    smallest, largest = min([sympy.Float(1), *sizes]) / SLACK, max([sympy.Float(1), *sizes]) * SLACK
    parts = list(_parts(answer))
    if len(parts) > MAX_PARTS:
        return False
    for part in parts:
        size = _size(part, numbers)
        # The whole has the size of the reference.
        if size is None or not (part in (answer, sympy.S.Zero) or smallest <= size <= largest):
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
    value = abs(part.evalf(SIZE_DIGITS, subs=numbers))
    return value if value.is_Float or value.is_Rational else None


def _largest_denominator(formula: Any) -> Any:
    return max([1, *(part.q for part in _parts(formula) if part.is_Rational)])
