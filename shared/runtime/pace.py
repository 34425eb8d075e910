"""Measures how often a process completes a unit of work, and decides when it is late. Pure; time is
an argument.
"""

from __future__ import annotations

from collections import deque

PAUSES_KEPT = 50
PAUSE_S = 0.5
"""Units of work that follow each other more quickly are one burst, as when a verifier scores what a
generator has just made. Only pauses say how long it may be quiet.
"""
KNOWN_AFTER_S = 60.0
"""Work of less than a minute says nothing of its usual pauses: a process that is started again
first does what was waiting, and the first pause of one that works in bursts is yet to come.
"""
FEWEST_PAUSES = 3
LATE_FACTOR = 5.0
LATE_AT_LEAST_S = 30.0
"""Evaluations, checkpoints and a busy machine cause gaps of several seconds even in quick work."""


class WorkPace:
    """The newest pauses between units of work, such as steps, and the bursts before them."""

    def __init__(self) -> None:
        self._pauses: deque[tuple[float, float, float]] = deque(maxlen=PAUSES_KEPT)
        """Each pause, and the seconds and squared gaps of the burst before it."""
        self._burst_s = self._burst_squares = 0.0
        self._units = 0
        self._first = self._last = 0.0

    def worked(self, now: float) -> None:
        """Record a unit of work that ended at `now`, in seconds of a monotonic clock."""
        if self._units:
            gap = max(0.0, now - self._last)
            if gap > PAUSE_S:
                self._pauses.append((gap, self._burst_s, self._burst_squares))
                self._burst_s = self._burst_squares = 0.0
            else:
                self._burst_s += gap
                self._burst_squares += gap * gap
        else:
            self._first = now
        self._last = now
        self._units += 1

    @property
    def usual_s(self) -> float | None:
        """The typical gap: the gap that a random moment falls into. None before the third unit of
        work, and while all of it was done within `KNOWN_AFTER_S`.

        Not the mean, because most gaps in bursts of work are close to 0. The longest pause is left
        out if it may be a stall, which must not hide the next: there are several others, or the
        work once went on for longer without any.
        """
        if self._units < 3 or self._last - self._first < KNOWN_AFTER_S:
            return None
        pauses = sorted(pause for pause, _, _ in self._pauses)
        bursts = [*(burst_s for _, burst_s, _ in self._pauses), self._burst_s]
        if len(pauses) >= FEWEST_PAUSES or (pauses and max(bursts) > pauses[-1]):
            pauses.pop()
        total = sum(pauses) + sum(bursts)
        squares = sum(pause * pause for pause in pauses) + sum(each for _, _, each in self._pauses) + self._burst_squares
        return squares / total if total > 0 else 0.0


def late_after_s(usual_s: float | None) -> float | None:
    """Seconds after its last unit of work from which a process counts as late; None if its pace is
    not known.
    """
    return None if usual_s is None else max(LATE_AT_LEAST_S, LATE_FACTOR * usual_s)
