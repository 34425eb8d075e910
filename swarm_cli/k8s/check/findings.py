"""What a rule has to say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for a person: what is wrong, for whom, and what to do."""

    stops: bool
    """Whether a part of the swarm would not run; otherwise something to know or to look at."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{'stops' if self.stops else 'note '}  {self.what}: {self.remedy}"


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names in a sentence: all of a few, the first of many."""
    each = sorted(set(names))
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")
