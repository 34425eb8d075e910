"""Bounded memory of names that senders choose, and of swarms that they choose besides: a sender may
push out what was said under its own name, and nothing of another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

SWARMS_A_NAME = 4
"""A node takes part in few swarms on one hub, and a sender may make up as many as it likes."""
KEYS_A_NAME = 8
NAMES_WITH_KEYS = 8
"""Keys are remembered of so many times as many names as reports are."""

T = TypeVar("T")


class ByName(Generic[T]):
    """One value for a name in a swarm (None: said without one). Of names those that spoke last are
    kept, and of each name the last few swarms.
    """

    def __init__(self, names_kept: int) -> None:
        self._names_kept = names_kept
        self._kept: dict[str, dict[str | None, T]] = {}

    def __iter__(self) -> Iterator[tuple[str | None, str, T]]:
        """Swarm, name and value."""
        for name, swarms in self._kept.items():
            for swarm, value in swarms.items():
                yield swarm, name, value

    def get(self, swarm: str | None, name: str) -> T | None:
        """What is kept."""
        return self._kept.get(name, {}).get(swarm)

    def put(self, swarm: str | None, name: str, value: T, looked_at: str | None) -> None:
        """Keep it as the last that was said. What a name said in the swarm `looked_at` is not given
        up for what it says in another one.
        """
        swarms = self._kept.pop(name, {})
        swarms.pop(swarm, None)
        swarms[swarm] = value
        self._kept[name] = swarms
        if len(swarms) > SWARMS_A_NAME:
            del swarms[next(each for each in swarms if each != looked_at or looked_at is None)]
        if len(self._kept) > self._names_kept:
            del self._kept[next(iter(self._kept))]


class FirstKeys:
    """The first key of each name in each swarm. Where there are too many, the newest make room:
    whoever came early keeps its name, however many come after it.
    """

    def __init__(self, names_kept: int) -> None:
        self._names_kept = NAMES_WITH_KEYS * names_kept
        self._kept: dict[str, dict[str, str]] = {}

    def get(self, swarm: str, name: str) -> str | None:
        """The name's key; None where it has none yet."""
        return self._kept.get(name, {}).get(swarm)

    def first(self, swarm: str, name: str, public_key: str) -> str:
        """The name's key, which is `public_key` from now on where it had none."""
        if name not in self._kept and len(self._kept) >= self._names_kept:
            self._kept.popitem()
        keys = self._kept.setdefault(name, {})
        if swarm not in keys and len(keys) >= KEYS_A_NAME:
            keys.popitem()
        return keys.setdefault(swarm, public_key)
