"""Bounded memory keyed by names and swarms that senders choose. A sender can push out its own
values, but of others' only those as new as its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

SWARMS_A_NAME = 4
"""Swarms kept per name. A node is in few swarms on one hub, but a sender can invent any number."""
ESTABLISHED_S = 600.0
"""Seconds between a name's first and last signed report that make it established. Names invented
for an attack have not existed that long."""
NEWCOMERS_PART = 4
"""One in this many places is reserved for names that are not established."""
SILENT_S = 86_400.0
KEYS_A_NAME = 8
NAMES_WITH_KEYS = 8
"""Keys are kept for this many times as many names as reports are."""

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    """A name's value in one swarm, and when the name was first and last heard there."""

    value: T
    first_at: float
    last_at: float


class ByName(Generic[T]):
    """Keeps one value per name and swarm (None: no swarm was named), and the last few swarms of
    each name.

    Anybody can invent names quickly. So a name that has signed for one swarm over `ESTABLISHED_S`
    is established and keeps its place, however many names come after it. The other names compete
    for the remaining places, and those heard last stay.
    """

    def __init__(self, names_kept: int) -> None:
        self._names_kept = names_kept
        self._newcomers: dict[str, dict[str | None, _Slot[T]]] = {}
        """In the order in which they were last heard."""
        self._established: dict[str, dict[str | None, _Slot[T]]] = {}
        """In the order in which they became established."""

    def __iter__(self) -> Iterator[tuple[str | None, str, T]]:
        """Swarm, name and value."""
        for names in (self._established, self._newcomers):
            for name, swarms in names.items():
                for swarm, slot in swarms.items():
                    yield swarm, name, slot.value

    def get(self, swarm: str | None, name: str) -> T | None:
        """The kept value; None if there is none."""
        slot = self._swarms(name).get(swarm)
        return None if slot is None else slot.value

    def established(self) -> list[str]:
        """Names that keep their places."""
        return list(self._established)

    def since(self, swarm: str | None, name: str) -> float | None:
        """When the name was first heard in this swarm; None if it is not kept."""
        slot = self._swarms(name).get(swarm)
        return None if slot is None else slot.first_at

    def is_established(self, swarm: str | None, name: str) -> bool:
        """Whether the name signed for this swarm for so long."""
        slot = self._swarms(name).get(swarm)
        return slot is not None and _is_established(swarm, slot)

    def put(self, swarm: str | None, name: str, value: T, looked_at: str | None, at: float, *, listed: bool = False) -> None:
        """Keep `value` as the newest. A name's value in the swarm `looked_at` is never dropped for
        its value in another swarm.

        Args:
            at: When it was sent, by the server's clock, which the sender cannot set.
            listed: Whether the reader's roster has the name.
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
        """Drop a newcomer. If the established names have more than their share, drop one of them
        instead: a silent one, or else the youngest.
        """
        if self._newcomers and len(self._established) <= self._names_kept - self._names_kept // NEWCOMERS_PART:
            del self._newcomers[next(iter(self._newcomers))]
            return
        silent = (
            name for name, swarms in self._established.items() if all(slot.last_at < now - SILENT_S for slot in swarms.values())
        )
        del self._established[next(silent, next(reversed(self._established)))]


def _to_forget(swarms: Mapping[str | None, _Slot[T]], kept: Collection[str | None]) -> str | None:
    """The swarm of a name to drop: the youngest in which the name is not established, because
    somebody else may have invented it; else the one last heard longest ago.
    """
    others = [swarm for swarm in swarms if swarm not in kept]
    made_up = [swarm for swarm in others if not _is_established(swarm, swarms[swarm])]
    return max(made_up, key=lambda swarm: swarms[swarm].first_at) if made_up else others[0]


def _is_established(swarm: str | None, slot: _Slot[T]) -> bool:
    return swarm is not None and slot.last_at - slot.first_at >= ESTABLISHED_S


class FirstKeys:
    """The first key of each name in each swarm. If there are too many names, the newest is dropped:
    an early name keeps its key, however many come after it.
    """

    def __init__(self, names_kept: int) -> None:
        self._names_kept = NAMES_WITH_KEYS * names_kept
        self._kept: dict[str, dict[str, str]] = {}

    def get(self, swarm: str, name: str) -> str | None:
        """The name's key; None if it has none yet."""
        return self._kept.get(name, {}).get(swarm)

    def first(self, swarm: str, name: str, public_key: str) -> str:
        """The name's key; if it had none, `public_key` becomes its key."""
        if name not in self._kept and len(self._kept) >= self._names_kept:
            self._kept.popitem()
        keys = self._kept.setdefault(name, {})
        if swarm not in keys and len(keys) >= KEYS_A_NAME:
            keys.popitem()
        return keys.setdefault(swarm, public_key)


def with_places(found: Sequence[T], most: int, is_known: Callable[[T], bool]) -> list[T]:
    """At most `most` of the entries in `found`, in their order. Known ones are kept before all
    others, so that invented names cannot push them out.
    """
    known = [place for place, each in enumerate(found) if is_known(each)]
    others = [place for place, each in enumerate(found) if not is_known(each)]
    return [found[place] for place in sorted([*known, *others][:most])]
