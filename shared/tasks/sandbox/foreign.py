"""The parent's side of foreign groups: processes that serve no local group, with their time divided
by sender.

A forker gets one group at a time, so that the time a sender can block it is known: the group's
deadline. `foreign_line` decides who is served next and who loses a group; `drop` ends a sender's
groups that are waiting or in progress.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from shared.tasks.sandbox.child import Child, WorkerLost
from shared.tasks.sandbox.foreign_line import ForeignLine
from shared.tasks.sandbox.jobs import Entry
from shared.tasks.sandbox.processes import SandboxError

SPARE_S = 10.0
"""How much longer than a group's deadline the parent waits for word: the forker has that deadline
to keep itself.
"""
LOST_ATTEMPTS = 2
DROPPED = "dropped"
"""Reason of results of a sender that is not listened to any more."""
CROWDED_OUT = "crowded_out"
"""Reason of results of groups that had to give way, because more waited than is kept."""

_log = logging.getLogger(__name__)


class ForeignLane:
    """Groups of others on their way, and the processes that they go to."""

    def __init__(self, group_timeout_s: float, start_child: Callable[[], Awaitable[Child]], newcomer_share: float) -> None:
        """`start_child` starts a forker. `newcomer_share`: as in `ForeignLine`."""
        self._group_timeout_s = group_timeout_s
        self._patience_s = group_timeout_s + SPARE_S
        self._start_child = start_child
        self._line: ForeignLine[Entry] = ForeignLine(newcomer_share)
        self._news = asyncio.Event()
        self._in_work: dict[Child, Entry] = {}
        self.runners: list[asyncio.Task[None]] = []
        """One for each process; they end when they are cancelled or cannot start another."""
        self.replaced = 0
        """Processes that died or said nothing, and were replaced."""

    @property
    def running(self) -> bool:
        """Whether there are processes."""
        return not all(runner.done() for runner in self.runners)

    def begin(self, children: Iterable[Child]) -> None:
        """Score in these processes, and in those that replace them, until the runners end."""
        self.runners = [asyncio.create_task(self._run(child)) for child in children]

    def senders(self) -> list[str]:
        """Whose groups wait or are in work."""
        return [*self._line]

    def offer(self, entry: Entry) -> None:
        """Put a group in line."""
        job = entry.job
        for lost in self._line.offer(job.sender or "", entry, job.size_bytes, established=job.established):
            lost.finish([], None, CROWDED_OUT, "more groups wait for the scorers than are kept")
        self._news.set()

    def drop(self, sender: str) -> int:
        """End what this sender has waiting or in work, with the reason `DROPPED`. Returns how many
        groups.
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
        """Give up all that waits."""
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
                    # `_serve` has failed the group at work and ended its process; the lane goes on.
                    self.replaced += 1
                    _log.exception("a process for foreign groups is restarted")
                    child = await self._start_child()
        except SandboxError as error:
            if all(runner.done() for runner in self.runners if runner is not asyncio.current_task()):
                self.fail_waiting(error)
            raise

    async def _serve(self, child: Child) -> None:
        """Score for ever, in `child` and those that replace it. Cancelled: what is in work fails
        with SandboxError.

        Raises:
            SandboxError: a process that is gone cannot be replaced.
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
                        # Whatever is wrong with one group, or with what came back for it, the next
                        # has a process.
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
        # No answer is known to be able to end the forker. That it did so twice at one group is the
        # group's cost all the same, by the time that it may take at most: nobody comes back for
        # ever, and nothing is free.
        entry.losses += 1
        entry.charged_s += min(seconds, self._group_timeout_s)
        if entry.losses >= LOST_ATTEMPTS:
            cause = str(error) if isinstance(error, WorkerLost) else f"failed ({type(error).__name__}: {str(error)[:200]})"
            entry.finish([], None, "scoring_timeout", f"its process {cause} {entry.losses} times")
        else:
            job = entry.job
            self._line.put_back(job.sender or "", entry, job.size_bytes, established=job.established)
