"""The result of a rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for the user: what is wrong, what it affects, and the remedy."""

    stops: bool
    """Whether a part of the swarm would not run; if not, it is only worth knowing."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{'stops' if self.stops else 'note '}  {self.what}: {self.remedy}"


def agree(names: Iterable[str], one: str, many: str) -> str:
    """The word that agrees in number with `names`: `agree(names, "stays", "stay")`."""
    return one if len(set(names)) == 1 else many


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names for a sentence: at most `most`, and how many more there are."""
    each = sorted(set(names))
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")
