"""Measures how often a process completes a unit of work, and decides when it is late. Pure; time is
an argument.
"""

from __future__ import annotations

from collections import deque

GAPS_KEPT = 50
KNOWN_AFTER_S = 10.0
"""A process that is started again first does what was waiting, in a burst that says nothing of its
usual pace.
"""
LATE_FACTOR = 5.0
LATE_AT_LEAST_S = 30.0
"""Evaluations, checkpoints and a busy machine cause gaps of several seconds even in quick work."""


class WorkPace:
    """The newest times between units of work, such as steps."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._first: float | None = None
        self._last: float | None = None

    def worked(self, now: float) -> None:
        """Record a unit of work that ended at `now`, in seconds of a monotonic clock."""
        if self._last is not None:
            self._gaps.append(max(0.0, now - self._last))
        self._last = now
        if self._first is None:
            self._first = now

    @property
    def usual_s(self) -> float | None:
        """The typical gap: the gap that a random moment falls into. None before the third unit of
        work, and while all of it was done within `KNOWN_AFTER_S`.

        Not the mean, because most gaps in bursts of work are close to 0. The longest gap is left
        out, so that one past stall does not hide the next.
        """
        if len(self._gaps) < 2 or self._first is None or self._last is None or self._last - self._first < KNOWN_AFTER_S:
            return None
        gaps = sorted(self._gaps)[:-1]
        total = sum(gaps)
        return sum(gap * gap for gap in gaps) / total if total > 0 else 0.0


def late_after_s(usual_s: float | None) -> float | None:
    """How long after its last unit of work a process counts as late; None if its pace is
    not known.
    """
    return None if usual_s is None else max(LATE_AT_LEAST_S, LATE_FACTOR * usual_s)
