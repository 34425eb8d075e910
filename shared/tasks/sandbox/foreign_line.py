"""Chooses which foreign group is scored next, and which is dropped when too many wait. Pure.

Established senders, which have earned a whole share, and newcomers are one class each. Within a
class time is divided by sender (`fair_share`); between the classes it is divided in proportion. All
newcomers together are guaranteed their part of the scorers' time while established senders wait
too, plus all that these leave. When too much waits, the class that uses most of its part loses a
group: the oldest of its sender with most waiting; among equals, of the one that has used most time.
So a sender of cheap groups finds room however many others send expensive ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.tasks.sandbox.fair_share import FairShare

T = TypeVar("T")

MAX_WAITING = 256
MAX_WAITING_BYTES = 64 * 2**20
_NEWEST = 0.25
"""Weight of the newest group in the moving average of a class's cost."""


@dataclass(slots=True)
class _Class(Generic[T]):
    part: float
    share: FairShare[tuple[T, int]] = field(default_factory=FairShare)
    clock_s: float = 0.0
    usual_s: float = 0.0
    in_service: int = 0
    size_bytes: int = 0

    @property
    def room(self) -> float:
        return (len(self.share) / MAX_WAITING + self.size_bytes / MAX_WAITING_BYTES) / self.part

    @property
    def turn_s(self) -> float:
        """The class with the lowest value is served first. Groups in service count at the usual
        cost until their own is known.
        """
        return self.clock_s + self.in_service * self.usual_s / self.part


class ForeignLine(Generic[T]):
    """The waiting groups. Each call says whether the sender is established; groups that already
    wait stay in their class.
    """

    def __init__(self, newcomer_share: float) -> None:
        """`newcomer_share`: part of the time and the room for all newcomers together, in (0, 1)."""
        self._classes: dict[bool, _Class[T]] = {True: _Class(1.0 - newcomer_share), False: _Class(newcomer_share)}

    def __len__(self) -> int:
        return sum(len(each.share) for each in self._classes.values())

    def __iter__(self) -> Iterator[str]:
        """Senders with something waiting or in service."""
        return iter({sender for each in self._classes.values() for sender in each.share})

    def offer(self, sender: str, item: T, size_bytes: int, *, established: bool) -> list[T]:
        """Add an item behind the sender's others. Returns the items dropped to make room, which may
        include this one.
        """
        place = self._classes[established]
        if not len(place.share) and not place.in_service:
            # A class that was idle accumulates no credit.
            place.clock_s = max(place.clock_s, self._classes[not established].clock_s)
        place.share.offer(sender, (item, size_bytes))
        place.size_bytes += size_bytes
        lost: list[T] = []
        while len(self) > MAX_WAITING:
            lost.append(self._lose(lambda items: (len(items),)))
        while self._waiting_bytes() > MAX_WAITING_BYTES and len(self) > 1:
            lost.append(self._lose(lambda items: (len(items) > 1, sum(size for _, size in items))))
        return lost

    def put_back(self, sender: str, item: T, size_bytes: int, *, established: bool) -> None:
        """Put an item that `next` returned back before the sender's others."""
        place = self._classes[established]
        place.share.put_back(sender, (item, size_bytes))
        place.size_bytes += size_bytes

    def next(self) -> tuple[str, T] | None:
        """The next item and its sender; None when nothing waits."""
        waiting = [each for each in self._classes.values() if len(each.share)]
        if not waiting:
            return None
        place = min(waiting, key=lambda each: each.turn_s)
        found = place.share.next()
        assert found is not None
        sender, (item, size_bytes) = found
        place.in_service += 1
        place.size_bytes -= size_bytes
        return sender, item

    def settle(self, sender: str, seconds: float, *, established: bool) -> None:
        """Record that an item returned by `next` is done and took this many seconds."""
        place = self._classes[established]
        place.in_service -= 1
        place.clock_s += seconds / place.part
        place.usual_s += _NEWEST * (seconds - place.usual_s)
        place.share.settle(sender, seconds)

    def drop(self, sender: str) -> list[T]:
        """Remove all waiting items of a sender."""
        dropped: list[T] = []
        for place in self._classes.values():
            for item, size_bytes in place.share.drop(sender):
                place.size_bytes -= size_bytes
                dropped.append(item)
        return dropped

    def _lose(self, room: Callable[[Collection[tuple[T, int]]], tuple[int, ...]]) -> T:
        place = max((each for each in self._classes.values() if len(each.share)), key=lambda each: each.room)
        item, size_bytes = place.share.lose(room)
        place.size_bytes -= size_bytes
        return item

    def _waiting_bytes(self) -> int:
        return sum(each.size_bytes for each in self._classes.values())
