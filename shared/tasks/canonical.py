"""Canonical JSON: equal values give the same text in every process, whatever container holds
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces.

    Tuples and arrays become lists, sets become lists sorted by their own JSON, mapping keys become
    strings, dates become ISO 8601, NaN and infinities become strings (JSON has none), anything else
    its `str`, unless that would contain a memory address.
    """
    try:
        return _FAST.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError):
        # Keys that JSON does not have, keys of several types, and NaN: the slower path handles all
        # of them.
        return _ENCODER.encode(_plain(value))


def _plain(value: Any) -> Any:
    """The order of the checks matters: a bool is an int, numpy's float64 is a float, and an enum
    may be a str or an int. Two nodes must derive the same text from the same value; otherwise
    honest groups are refused as `task_mismatch`.
    """
    if value is None or isinstance(value, bool | str) and not isinstance(value, Enum):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((_plain(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal | Fraction):
        return str(value)
    return _described(value)


_FAST = msgspec.json.Encoder(order="sorted")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(_plain(key), sort_keys=True)


def _described(value: Any) -> str:
    # The default repr contains a memory address, which differs between processes.
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
