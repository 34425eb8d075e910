"""Suggests the known name that a misspelt one probably means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 100
"""Characters of a name that is compared: the time grows with their square."""
_CLEARLY = 0.1
"""How far the best match must lead the second, in difflib's ratio, to be suggested alone."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that suggests the closest known names; empty if none is close to `name`.

    Example: `did_you_mean("m2p0", ["dapo", "m2po"])` is `did you mean m2po?`.
    """
    return asked_for(closest(name, known))


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The one or two known names that are close to `name`, the closest first."""
    if len(name) > _LONGEST:
        return []
    close = difflib.get_close_matches(name, [each for each in known if len(each) <= _LONGEST], n=2)
    if len(close) == 2 and _likeness(name, close[0]) - _likeness(name, close[1]) > _CLEARLY:
        del close[1]
    return close


def asked_for(names: Iterable[str]) -> str:
    """The question whether one of `names` was meant; empty without any."""
    choice = " or ".join(names)
    return f"did you mean {choice}?" if choice else ""


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
