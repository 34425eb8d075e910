"""Converts a value from a file to text: the same value gives the same text, whatever format it was
stored in.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

MAX_DIGITS = 4_300
"""Most digits of a number as text: what Python takes for a whole number in JSON. The ten characters
of `1e99999999` would else become a hundred million.
"""


class ValueProblem(ValueError):
    """A value cannot be a question or an answer. The message continues a sentence that begins with
    the column's name.
    """


class Unusable(NamedTuple):
    """Stands for a value that a file holds and that cannot be a question or an answer."""

    why: str


def exact_number(literal: str) -> float | Decimal | Unusable:
    """A number of JSON that has a point or an exponent: a double if that is all that it says, and
    else a decimal, which Parquet can hold as well. Two numbers that differ in a digit that a double
    loses would be one answer, and their files one dataset.
    """
    number = float(literal)
    if repr(number) == literal or not math.isfinite(number):
        return number
    if len(literal) > MAX_DIGITS:
        return _too_many_digits
    if not literal.lower().partition("e")[0].strip("-0."):
        return number  # zero, whatever its exponent
    try:
        exact = Decimal(literal)
    except InvalidOperation:  # an exponent of twenty digits
        return _too_many_digits
    return number if exact == Decimal(repr(number)) else exact


_too_many_digits = Unusable(f"has more than {MAX_DIGITS:,} digits when written without exponent: shorten it, or write it as text")


def as_text(value: Any) -> str:
    """The value as text: text unchanged; numbers in digits, without exponent and superfluous zeros;
    `true` and `false`.

    3, 3.0 and the decimal 3.00 all become `3`, because file formats differ in which of them they
    can store.

    Raises:
        ValueProblem: null, not a finite number, one of more than `MAX_DIGITS` digits, composed of
            several values, or unusable.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Unusable):
        raise ValueProblem(value.why)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        raise ValueProblem("has no value (null): give it one or remove the row")
    if isinstance(value, int):
        return _digits(Decimal(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueProblem(f"is {value}, which is not a number that answers can be compared with: write it as text")
        return _digits(Decimal(repr(value)))
    if isinstance(value, Decimal) and value.is_finite():
        return _digits(value)
    if isinstance(value, list | tuple | dict):
        raise ValueProblem("consists of several values (a list or an object): make it one text or number")
    raise ValueProblem(f"is a {type(value).__name__}, neither text nor number: store it as text")


def _digits(value: Decimal) -> str:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), "an infinity or NaN, which the caller refuses"
    if max(value.adjusted() + 1, 1) + max(-exponent, 0) > MAX_DIGITS:
        raise ValueProblem(_too_many_digits.why)
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
