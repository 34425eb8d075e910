"""The jobs sent to one worker, in order, and how many to send at a time. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from typing import Any

from shared.tasks.sandbox.child import Child, WorkerLost
from shared.tasks.sandbox.jobs import Entry
from shared.tasks.sandbox.protocol import DERIVING
from shared.tasks.sandbox.replies import BrokenReply

FIRST_BATCH_JOBS = 4
MAX_BATCH_JOBS = 128
BATCH_CHARS = 4_000_000
BATCH_S = 0.02
"""Target duration of a batch: long enough to keep the overhead small, short enough to delay few
jobs when one hangs.
"""
BATCHES_IN_WORK = 2
UNEXPLAINED_LOSSES = 3


class WorkerQueue:
    """A worker and the jobs that were sent to it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._entries: deque[Entry] = deque()
        self._first = 0
        self._batches: deque[tuple[int, int]] = deque()
        self._batch_jobs = FIRST_BATCH_JOBS
        self._busy_since_s = 0.0
        self._stalled = False

    @property
    def idle(self) -> bool:
        """Whether the worker has no jobs."""
        return not self._entries

    @property
    def room(self) -> int:
        """How many jobs may be sent to it now."""
        return self._batch_jobs if len(self._batches) < BATCHES_IN_WORK and not self._stalled else 0

    def stall(self) -> None:
        """Send it nothing more until it has finished something."""
        self._stalled = True

    def send(self, batch: list[Entry], now_s: float) -> None:
        """Record that a batch was sent."""
        if not self._entries:
            self._busy_since_s = now_s
        for entry in batch:
            entry.started_s = entry.started_s or now_s
        self._entries.extend(batch)
        self._batches.append((self._first + len(self._entries), len(batch)))
        self.child.send([entry.packed() for entry in batch])

    def take(self, results: list[list[Any]], now_s: float) -> None:
        """Settle the oldest jobs, and adapt the batch size to finished batches.

        Raises:
            BrokenReply: a result has the wrong form; its job and those behind it are unchanged.
        """
        self._stalled = False
        for result in results:
            if not self._entries:
                raise BrokenReply("more results than jobs")
            self._entries[0].take(result)
            self._entries.popleft().held -= 1
        self._first += len(results)
        while self._batches and self._batches[0][0] <= self._first:
            _, jobs = self._batches.popleft()
            fitting = int(BATCH_S * jobs / max(1e-9, now_s - self._busy_since_s))
            self._batch_jobs = max(1, self._batch_jobs // 2, min(fitting, 2 * self._batch_jobs, MAX_BATCH_JOBS))
            self._busy_since_s = now_s

    def besides(self, number: int) -> list[Entry]:
        """Unsettled jobs other than job `number` that no other worker has, including earlier ones
        whose results have not been sent yet.
        """
        others = [entry for job, entry in enumerate(self._entries, self._first) if job != number]
        return [entry for entry in others if entry.held == 1 and not entry.over]

    def lose(self, lost: WorkerLost) -> list[Entry]:
        """Blame the job that the worker was working on. Returns, in order, the unsettled jobs that
        no other worker has.
        """
        entries = list(self._entries)
        self._entries.clear()
        for entry in entries:
            entry.held -= 1
        guilty = entries[lost.step[0] - self._first] if lost.step and 0 <= lost.step[0] - self._first < len(entries) else None
        if lost.step is None or guilty is None:
            _blame_nobody(entries, lost)
        else:
            _blame(guilty, lost.step[1], lost)
        return [entry for entry in entries if entry.held == 0 and not entry.over]

    def release(self) -> list[Entry]:
        """Return all its jobs and forget them."""
        entries = list(self._entries)
        self._entries.clear()
        return entries


def _blame_nobody(entries: list[Entry], lost: WorkerLost) -> None:
    # The worker died between jobs, so no job is known to be the cause. Counting losses for each of
    # them ensures that none is retried for ever.
    for entry in entries:
        entry.losses += 1
        if entry.losses >= UNEXPLAINED_LOSSES:
            entry.finish([], None, "scoring_timeout", f"its worker {lost} {entry.losses} times")


def _blame(guilty: Entry, step: int, lost: WorkerLost) -> None:
    if step == DERIVING:
        guilty.finish([], None, "scoring_timeout", f"{guilty.job.ref.dataset}: deriving the task: worker {lost}")
        return
    if not lost.hung and step - 1 not in guilty.hung:
        guilty.died.add(step - 1)
    guilty.hung.add(step - 1)
