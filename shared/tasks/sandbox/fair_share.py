"""Chooses whose group is scored next: that of the sender that has used the least scorer time so
far. Pure.

Start-time fair queueing (Goyal, Vin, Chen 1996): each sender has a clock that advances by the cost
of its groups, and the sender with the lowest clock is served. A sender that arrives or returns
starts at the clock of those being served, so that silence accumulates no credit and a new key does
not jump the queue. A sender of cheap groups waits for at most one group of each other sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_CLOCKS = 10_000


class FairShare(Generic[T]):
    """Waiting groups by sender."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        self._clocks: dict[str, float] = {}
        self._in_service: dict[str, int] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[str]:
        """Senders with something waiting or in service."""
        return iter({*self._waiting, *self._in_service})

    def offer(self, sender: str, item: T) -> None:
        """Add an item behind the sender's others."""
        self._waiting.setdefault(sender, deque()).append(item)
        if sender not in self._clocks:
            self._clocks[sender] = self._now
        elif sender not in self._in_service and len(self._waiting[sender]) == 1:
            self._clocks[sender] = max(self._clocks[sender], self._now)

    def put_back(self, sender: str, item: T) -> None:
        """Put an item back before the sender's others."""
        self.offer(sender, item)
        self._waiting[sender].rotate(1)

    def next(self) -> tuple[str, T] | None:
        """The next item and its sender; None when nothing waits. A sender with an item in service
        comes after those without.
        """
        if not self._waiting:
            return None
        sender = min(self._waiting, key=lambda each: (self._in_service.get(each, 0), self._clocks[each]))
        line = self._waiting[sender]
        item = line.popleft()
        if not line:
            del self._waiting[sender]
        self._in_service[sender] = self._in_service.get(sender, 0) + 1
        self._now = max(self._now, self._clocks[sender])
        return sender, item

    def settle(self, sender: str, seconds: float) -> None:
        """Record that an item returned by `next` is done and took this many seconds."""
        self._clocks[sender] += seconds
        self._in_service[sender] -= 1
        if not self._in_service[sender]:
            del self._in_service[sender]
        # A sender whose clock is behind those being served can be forgotten, because it would start
        # at their clock anyway. With very many senders, those whose clock is ahead are forgotten
        # too.
        active = {*self}
        ahead = len(self._clocks) <= MAX_CLOCKS
        self._clocks = {each: clock for each, clock in self._clocks.items() if each in active or (ahead and clock > self._now)}

    def lose(self, room: Callable[[Collection[T]], tuple[int, ...]]) -> T:
        """Remove the oldest item of the sender whose waiting items take most `room`; among equals,
        of the one that has used most time.

        Raises ValueError when nothing waits.
        """
        sender = max(self._waiting, key=lambda each: (room(self._waiting[each]), self._clocks[each]))
        line = self._waiting[sender]
        item = line.popleft()
        if not line:
            del self._waiting[sender]
        return item

    def drop(self, sender: str) -> list[T]:
        """Remove all waiting items of a sender."""
        return list(self._waiting.pop(sender, ()))
