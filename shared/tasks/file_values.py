"""Converts a value from a file to text: the same value gives the same text, whatever format it was
stored in.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple


class ValueProblem(ValueError):
    """A value cannot be a question or an answer. The message continues a sentence that begins with
    the column's name.
    """


class Unusable(NamedTuple):
    """Stands for a value that a file holds and that cannot be a question or an answer."""

    why: str


def as_text(value: Any) -> str:
    """The value as text: text unchanged; numbers in digits, without exponent and superfluous zeros;
    `true` and `false`.

    3, 3.0 and the decimal 3.00 all become `3`, because file formats differ in which of them they
    can store.

    Raises:
        ValueProblem: null, not a finite number, composed of several values, or unusable.
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
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
