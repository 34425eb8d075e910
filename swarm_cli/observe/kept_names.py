"""Bounded memory of names that senders choose, and of swarms that they choose besides: a sender may
push out what was said under its own name, and of others' only what is as new as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

SWARMS_A_NAME = 4
"""A node takes part in few swarms on one hub, and a sender may make up as many as it likes."""
ESTABLISHED_S = 600.0
"""Between a name's first and last signed word: what is made up for a look has not lived as long."""
NEWCOMERS_PART = 4
"""One place in so many is for names that are not established."""
SILENT_S = 86_400.0
KEYS_A_NAME = 8
NAMES_WITH_KEYS = 8
"""Keys are remembered of so many times as many names as reports are."""

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    """What a name said in one swarm, and when it was heard there first and last."""

    value: T
    first_at: float
    last_at: float


class ByName(Generic[T]):
    """One value for a name in a swarm (None: said without one), and of each name the last few
    swarms.

    Names are made up as fast as they are written. So a name that signed for one swarm over
    `ESTABLISHED_S` is established and keeps its place, however many come after it; those that are
    not compete among themselves, and those that spoke last stay.
    """

    def __init__(self, names_kept: int) -> None:
        self._names_kept = names_kept
        self._newcomers: dict[str, dict[str | None, _Slot[T]]] = {}
        """That which spoke last at the end."""
        self._established: dict[str, dict[str | None, _Slot[T]]] = {}
        """In the order in which they became it."""

    def __iter__(self) -> Iterator[tuple[str | None, str, T]]:
        """Swarm, name and value."""
        for names in (self._established, self._newcomers):
            for name, swarms in names.items():
                for swarm, slot in swarms.items():
                    yield swarm, name, slot.value

    def get(self, swarm: str | None, name: str) -> T | None:
        """What is kept."""
        slot = self._swarms(name).get(swarm)
        return None if slot is None else slot.value

    def established(self) -> list[str]:
        """Names that keep their places."""
        return list(self._established)

    def since(self, swarm: str | None, name: str) -> float | None:
        """When the name was first heard in this swarm; None where it is not kept."""
        slot = self._swarms(name).get(swarm)
        return None if slot is None else slot.first_at

    def is_established(self, swarm: str | None, name: str) -> bool:
        """Whether the name signed for this swarm for so long."""
        slot = self._swarms(name).get(swarm)
        return slot is not None and _is_established(swarm, slot)

    def put(self, swarm: str | None, name: str, value: T, looked_at: str | None, at: float, *, listed: bool = False) -> None:
        """Keep it as the last that was said. What a name said in the swarm `looked_at` is not given
        up for what it says in another one.

        Args:
            at: When it was said, by the server's clock, which the sender does not set.
            listed: The reader's roster has the name.
        """
        swarms = self._swarms(name)
        last = swarms.pop(swarm, None)
        slot = swarms[swarm] = _Slot(value, at if last is None else last.first_at, at)
        if len(swarms) > SWARMS_A_NAME:
            del swarms[_to_forget(swarms, {swarm, looked_at})]
        if name not in self._established:
            self._newcomers.pop(name, None)
            kept = self._established if listed or _is_established(swarm, slot) else self._newcomers
            kept[name] = swarms
        if len(self._established) + len(self._newcomers) > self._names_kept:
            self._make_room(at)

    def _swarms(self, name: str) -> dict[str | None, _Slot[T]]:
        return self._established.get(name) or self._newcomers.get(name) or {}

    def _make_room(self, now: float) -> None:
        """A newcomer goes, unless the established have more than their part: then one that is
        silent, or else the youngest of them.
        """
        if self._newcomers and len(self._established) <= self._names_kept - self._names_kept // NEWCOMERS_PART:
            del self._newcomers[next(iter(self._newcomers))]
            return
        silent = (
            name for name, swarms in self._established.items() if all(slot.last_at < now - SILENT_S for slot in swarms.values())
        )
        del self._established[next(silent, next(reversed(self._established)))]


def _to_forget(swarms: Mapping[str | None, _Slot[T]], kept: Collection[str | None]) -> str | None:
    """Of a name's swarms the youngest in which it is not established, as others may have said it;
    where there is none that which it left first.
    """
    others = [swarm for swarm in swarms if swarm not in kept]
    made_up = [swarm for swarm in others if not _is_established(swarm, swarms[swarm])]
    return max(made_up, key=lambda swarm: swarms[swarm].first_at) if made_up else others[0]


def _is_established(swarm: str | None, slot: _Slot[T]) -> bool:
    return swarm is not None and slot.last_at - slot.first_at >= ESTABLISHED_S


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


def with_places(found: Sequence[T], most: int, is_known: Callable[[T], bool]) -> list[T]:
    """`most` of what was found, in its order. Who is known has a place before all others, so that
    nobody is pushed out by names made up for it.
    """
    known = [place for place, each in enumerate(found) if is_known(each)]
    others = [place for place, each in enumerate(found) if not is_known(each)]
    return [found[place] for place in sorted([*known, *others][:most])]
