"""Local jobs that wait for a worker: urgent ones first, each kind in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shared.tasks.sandbox.jobs import Entry
from shared.tasks.sandbox.worker_queue import BATCH_CHARS


class WaitingJobs:
    """Two queues of jobs. False when both are empty."""

    def __init__(self) -> None:
        self._urgent: deque[Entry] = deque()
        self._others: deque[Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self._urgent or self._others)

    def add(self, entry: Entry) -> None:
        """Add a job at the end of its queue."""
        self._line_of(entry).append(entry)

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Put jobs back, in their order, ahead of everything that came later."""
        for entry in reversed(entries):
            entry.held = max(1, entry.held)
            self._line_of(entry).appendleft(entry)

    def next_batch(self, room: int) -> list[Entry]:
        """Take at most `room` jobs; fewer if their texts are long (`BATCH_CHARS`)."""
        batch: list[Entry] = []
        chars = 0
        for line in (self._urgent, self._others):
            while line and len(batch) < room and chars < BATCH_CHARS:
                entry = line.popleft()
                if entry.over:
                    entry.held -= 1
                else:
                    batch.append(entry)
                    chars += entry.chars
        return batch

    def fail(self, error: Exception) -> None:
        """Fail everything that waits."""
        for line in (self._urgent, self._others):
            while line:
                line.popleft().request.fail(error)

    def _line_of(self, entry: Entry) -> deque[Entry]:
        return self._urgent if entry.job.urgent else self._others
