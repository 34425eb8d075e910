"""The parent's side of foreign groups: processes that score no local group, with their time divided
by sender.

A forker gets one group at a time, so that the time a sender can block it is known: the group's
deadline. `drop` ends a sender's groups that are waiting or in progress.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.tasks.sandbox.child import Child, SandboxError, WorkerLost
from shared.tasks.sandbox.jobs import Entry

SPARE_S = 10.0
"""How much longer than a group's deadline the parent waits for a reply. The forker keeps the
deadline itself.
"""
LOST_ATTEMPTS = 2
DROPPED = "dropped"
"""Reason of results for a sender that has been shut out."""
CROWDED_OUT = "crowded_out"
"""Reason of results for groups that were dropped because too many were waiting."""

_log = logging.getLogger(__name__)


class ForeignLane:
    """Foreign groups in progress, and the processes that score them."""

    def __init__(self, group_timeout_s: float, start_child: Callable[[], Awaitable[Child]], newcomer_share: float) -> None:
        """`start_child` starts a forker. `newcomer_share`: as in `ForeignLine`."""
        self._group_timeout_s = group_timeout_s
        self._patience_s = group_timeout_s + SPARE_S
        self._start_child = start_child
        self._line: ForeignLine[Entry] = ForeignLine(newcomer_share)
        self._news = asyncio.Event()
        self._in_work: dict[Child, Entry] = {}
        self.runners: list[asyncio.Task[None]] = []
        """One task per process. It ends when it is cancelled or cannot start another process."""
        self.replaced = 0
        """Number of processes that died or stopped replying and were replaced."""

    @property
    def running(self) -> bool:
        return not all(runner.done() for runner in self.runners)

    def begin(self, children: Iterable[Child]) -> None:
        self.runners = [asyncio.create_task(self._run(child)) for child in children]

    def senders(self) -> list[str]:
        return [*self._line]

    def offer(self, entry: Entry) -> None:
        job = entry.job
        for lost in self._line.offer(job.sender or "", entry, job.size_bytes, established=job.established):
            lost.finish([], None, CROWDED_OUT, "more groups wait for the scorers than are kept")
        self._news.set()

    def drop(self, sender: str) -> int:
        """End the groups of this sender that are waiting or in progress, with the reason `DROPPED`.
        Returns their number.
        """
        entries = self._line.drop(sender)
        for child, entry in self._in_work.items():
            if entry.job.sender == sender and not entry.over:
                entries.append(entry)
                child.interrupt()
        for entry in entries:
            entry.finish([], None, DROPPED, "its sender is left out")
        return len(entries)

    def fail_waiting(self, error: Exception) -> None:
        for sender in self.senders():
            for entry in self._line.drop(sender):
                entry.request.fail(error)

    async def _run(self, child: Child) -> None:
        try:
            while True:
                try:
                    await self._serve(child)
                except SandboxError:
                    raise
                except Exception:
                    # `_serve` has failed the group in progress and ended its process; the lane
                    # continues.
                    self.replaced += 1
                    _log.exception("a process for foreign groups is restarted")
                    child = await self._start_child()
        except SandboxError as error:
            if all(runner.done() for runner in self.runners if runner is not asyncio.current_task()):
                self.fail_waiting(error)
            raise

    async def _serve(self, child: Child) -> None:
        """Score groups in `child` and its replacements, without end. When cancelled, the group in
        progress fails with SandboxError.

        Raises:
            SandboxError: a lost process cannot be replaced.
        """
        try:
            while True:
                found = self._line.next()
                if found is None:
                    self._news.clear()
                    await self._news.wait()
                    continue
                sender, entry = found
                started_s = time.monotonic()
                if not entry.over:
                    entry.started_s = entry.started_s or started_s
                    self._in_work[child] = entry
                    try:
                        child.send(entry.packed())
                        entry.take_foreign(await child.reply(self._patience_s))
                    except Exception as error:
                        # Whatever went wrong with one group or its reply, the next group gets a new
                        # process.
                        self.replaced += 1
                        self._after_loss(entry, time.monotonic() - started_s, error)
                        del self._in_work[child]
                        await child.kill()
                        child = await self._start_child()
                    else:
                        del self._in_work[child]
                self._line.settle(sender, time.monotonic() - started_s, established=entry.job.established)
        finally:
            if child in self._in_work:
                self._in_work.pop(child).request.fail(SandboxError("the sandbox was closed"))
            await child.kill()

    def _after_loss(self, entry: Entry, seconds: float, error: Exception) -> None:
        # No answer is known to be able to end the forker. If it ends twice at the same group, the
        # group is charged the time that it may take at most. So no group is retried without end,
        # and none is free.
        entry.losses += 1
        entry.charged_s += min(seconds, self._group_timeout_s)
        if entry.losses >= LOST_ATTEMPTS:
            cause = str(error) if isinstance(error, WorkerLost) else f"failed ({type(error).__name__}: {str(error)[:200]})"
            entry.finish([], None, "scoring_timeout", f"its process {cause} {entry.losses} times")
        else:
            job = entry.job
            self._line.put_back(job.sender or "", entry, job.size_bytes, established=job.established)


T = TypeVar("T")

# Chooses whose group is scored next: that of the sender that has used the least scorer time so far.
# Pure.
#
# Start-time fair queueing (Goyal, Vin, Chen 1996): each sender has a clock that advances by the
# cost of its groups, and the sender with the lowest clock is served. A sender that arrives or
# returns starts at the clock of those being served, so that silence accumulates no credit and a new
# key does not jump the queue. A sender of cheap groups waits for at most one group of each other
# sender.


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
        return iter({*self._waiting, *self._in_service})

    def offer(self, sender: str, item: T) -> None:
        self._waiting.setdefault(sender, deque()).append(item)
        if sender not in self._clocks:
            self._clocks[sender] = self._now
        elif sender not in self._in_service and len(self._waiting[sender]) == 1:
            self._clocks[sender] = max(self._clocks[sender], self._now)

    def put_back(self, sender: str, item: T) -> None:
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
        return list(self._waiting.pop(sender, ()))


# Chooses which foreign group is scored next, and which is dropped when too many wait. Pure.
#
# Established senders, which have earned a whole share, and newcomers are one class each. Within a
# class time is divided by sender; between the classes it is divided in proportion.
# All newcomers together are guaranteed their part of the scorers' time while established senders
# wait too, plus all that these leave. When too much waits, the class that uses most of its part
# loses a group: the oldest of its sender with most waiting; among equals, of the one that has used
# most time. So a sender of cheap groups finds room however many others send expensive ones.


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
        place = self._classes[established]
        place.share.put_back(sender, (item, size_bytes))
        place.size_bytes += size_bytes

    def next(self) -> tuple[str, T] | None:
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
        place = self._classes[established]
        place.in_service -= 1
        place.clock_s += seconds / place.part
        place.usual_s += _NEWEST * (seconds - place.usual_s)
        place.share.settle(sender, seconds)

    def drop(self, sender: str) -> list[T]:
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
