"""Which senders are quarantined, and for how long. The reputation decides why."""

from __future__ import annotations

FIRST_S = 60.0
LONGEST_S = 3600.0
MAX_SENDERS = 10_000


class Quarantine:
    """Each strike doubles the duration, which returns to the first length after a quiet hour. Time
    is an argument.
    """

    def __init__(self) -> None:
        self._senders: dict[str, tuple[float, float]] = {}

    def strike(self, sender: str, now_s: float) -> float:
        """Quarantine `sender` from now on. Returns the duration in seconds."""
        until_s, length_s = self._senders.pop(sender, (0.0, 0.0))
        repeated = until_s > now_s - LONGEST_S
        length_s = min(LONGEST_S, 2 * length_s) if repeated and length_s else FIRST_S
        self._senders[sender] = (now_s + length_s, length_s)
        if len(self._senders) > MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        return length_s

    def remaining_s(self, sender: str, now_s: float) -> float:
        """Remaining seconds of `sender`'s quarantine; 0 if there is none. A clock that is set back
        does not prolong it beyond its length.
        """
        until_s, length_s = self._senders.get(sender, (0.0, 0.0))
        return min(length_s, max(0.0, until_s - now_s))

    def term(self, sender: str) -> tuple[float, float]:
        """The end (Unix time) and length of `sender`'s last quarantine; zeros if there was none."""
        return self._senders.get(sender, (0.0, 0.0))

    def restore(self, sender: str, until_s: float, length_s: float) -> None:
        """Restore a quarantine that was recorded elsewhere."""
        self._senders.pop(sender, None)
        if length_s > 0:
            self._senders[sender] = (until_s, min(length_s, LONGEST_S))

    def count(self, now_s: float) -> int:
        """Number of senders in quarantine."""
        return sum(until_s > now_s for until_s, _ in self._senders.values())
