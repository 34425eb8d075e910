"""The time left for a call."""

from __future__ import annotations

import asyncio


class Deadline:
    """A point in time by which an operation must have ended."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self._loop.time())

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s <= 0.0
