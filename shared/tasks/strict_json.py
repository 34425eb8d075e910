"""Strict JSON, in which nothing can be hidden: no duplicate keys, no NaN or infinities, limited
length and depth.
"""

from __future__ import annotations

import json
from typing import Any

MAX_CHARS = 65_536
MAX_DEPTH = 12
MAX_NUMBER_DIGITS, MAX_NUMBER_CHARS = 17, 25
"""Most digits that count, and characters, of a number with a point or an exponent. A double has no
more digits, and further ones would be text that is not compared.
"""


def read_json(text: str) -> Any:
    """The value that the whole of `text` represents.

    Raises:
        ValueError: not JSON, a duplicate key, `NaN` or `Infinity`, too long, nested more than
            `MAX_DEPTH` deep, or a number with more digits than a double has.
    """
    if len(text) > MAX_CHARS:
        raise ValueError("too long")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _bound(value, MAX_DEPTH)
    return value


def same_json(left: Any, right: Any) -> bool:
    """Equality in which `1`, `1.0` and `true` are three different values, unlike in Python."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_json(value, right[key]) for key, value in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _float(text: str) -> float:
    digits = text.lower().partition("e")[0].replace(".", "").lstrip("-0")
    if len(text) > MAX_NUMBER_CHARS or len(digits) > MAX_NUMBER_DIGITS:
        raise ValueError("a number with too many digits")
    return float(text)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _bound(value: Any, depth: int) -> None:
    if depth < 0:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, list) or not isinstance(value, str | int | float | bool | None):
        for item in value:
            _bound(item, depth - 1)
