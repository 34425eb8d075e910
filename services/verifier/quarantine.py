"""Senders whose groups made a scorer hang are left out for a while, because a hang costs far more than it cost to send."""

from __future__ import annotations

FIRST_S = 60.0
LONGEST_S = 3600.0
MAX_SENDERS = 10_000


class Quarantine:
    """Twice as long for each strike, back to the first length after a quiet hour. Time is an argument."""

    def __init__(self) -> None:
        self._senders: dict[str, tuple[float, float]] = {}

    def strike(self, sender: str, now_s: float) -> None:
        """Leave out `sender`, whose group made a scorer hang."""
        until_s, length_s = self._senders.pop(sender, (0.0, 0.0))
        repeated = until_s > now_s - LONGEST_S
        length_s = min(LONGEST_S, 2 * length_s) if repeated and length_s else FIRST_S
        self._senders[sender] = (now_s + length_s, length_s)
        if len(self._senders) > MAX_SENDERS:
            del self._senders[next(iter(self._senders))]

    def remaining_s(self, sender: str, now_s: float) -> float:
        """How long `sender` is still left out; 0 when it is not."""
        return max(0.0, self._senders.get(sender, (0.0, 0.0))[0] - now_s)
