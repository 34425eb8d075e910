"""The parent's side of foreign groups: processes that score no local group, with their time divided
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
        """Whether there are processes."""
        return not all(runner.done() for runner in self.runners)

    def begin(self, children: Iterable[Child]) -> None:
        """Score in these processes, and in their replacements, until the runners end."""
        self.runners = [asyncio.create_task(self._run(child)) for child in children]

    def senders(self) -> list[str]:
        """The senders whose groups are waiting or in progress."""
        return [*self._line]

    def offer(self, entry: Entry) -> None:
        """Add a group to the line."""
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
        """Fail everything that waits."""
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
