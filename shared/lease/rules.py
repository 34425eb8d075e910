"""The rules of a lease, as plain state: when a newcomer may take it, and how long its holder may
write. Time is an argument, in seconds of the caller's clock; clocks of two machines are never
compared.
"""

from __future__ import annotations

from typing import Literal

Verdict = Literal["take", "wait", "held"]

_HOLDERS_PART = 0.9
"""The part of a lease during which its holder writes. It is below 1, so that it stops before a
newcomer can take over even if the two clocks run at different speeds.
"""
_GAP_PART, _GAP_S = 0.2, 1.0
"""Two looks further apart than this part of a lease, or this long, do not prove that the holder was
silent in between.
"""


class Newcomer:
    """Decides, from repeated looks at a lease, whether a newcomer may take it.

    It may take a lease that was not renewed for the lease's time while the server answered
    throughout. A holder cannot renew while the server is unreachable, and must not lose its name
    for that.
    """

    def __init__(self) -> None:
        self._revision: int | None = None
        self._since_s = self._last_s = 0.0

    def look(self, *, free: bool, revision: int, now_s: float, lease_s: float) -> Verdict:
        """Judge the lease as read at `now_s`.

        Args:
            free: nobody has it, its holder gave it up, or its holder is known to be dead.
            revision: the entry's, which grows with each renewal; 0: there is no entry.
            lease_s: the lease's time; the longer of the holder's and the newcomer's.
        """
        if free:
            return "take"
        if self._revision is not None and revision > self._revision:
            return "held"
        if self._revision is None or now_s - self._last_s > max(_GAP_S, _GAP_PART * lease_s):
            self._revision, self._since_s = revision, now_s
        self._last_s = now_s
        return "take" if now_s - self._since_s >= lease_s else "wait"


class Term:
    """How long a holder may write without asking the server. It counts from the moment when a
    renewal was sent, which is before any newcomer could have seen it.
    """

    def __init__(self, lease_s: float) -> None:
        self._term_s = _HOLDERS_PART * lease_s
        self._until_s = float("-inf")

    def renewed(self, sent_s: float) -> None:
        """The server accepted a renewal sent at `sent_s`."""
        self._until_s = max(self._until_s, sent_s + self._term_s)

    def holds(self, now_s: float) -> bool:
        """Whether no newcomer can have taken the lease yet."""
        return now_s < self._until_s
