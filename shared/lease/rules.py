"""The rules of a lease, as plain state: when a newcomer may take one, and how long its holder may
write. Time is an argument, in seconds of the asking machine's own clock; two machines' clocks are
never compared.
"""

from __future__ import annotations

from typing import Literal

Verdict = Literal["take", "wait", "held"]

_HOLDERS_PART = 0.9
"""A holder stops writing before a newcomer may have taken over: clocks do not run equally fast."""
_GAP_PART, _GAP_S = 0.2, 1.0
"""Looks further apart than this part of a lease, or this long, do not belong together."""


class Newcomer:
    """What a newcomer makes of a lease that it looks at again and again.

    It may take a lease that was not renewed for its time while the server answered all the time:
    a holder cannot renew at a server that is away, and must not lose its name for that.
    """

    def __init__(self) -> None:
        self._revision: int | None = None
        self._since_s = self._last_s = 0.0

    def look(self, *, free: bool, revision: int, now_s: float, lease_s: float) -> Verdict:
        """The lease was read at `now_s`.

        Args:
            free: nobody has it, its holder gave it up, or its holder is known to be dead.
            revision: of the entry; it grows with each renewal. 0: there is none.
            lease_s: the lease's time, as its holder or the newcomer has it: the longer one.
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
    """How long a holder may write without asking: it counts from when a renewal was sent, which is
    before any newcomer could have seen it.
    """

    def __init__(self, lease_s: float) -> None:
        self._term_s = _HOLDERS_PART * lease_s
        self._until_s = float("-inf")

    def renewed(self, sent_s: float) -> None:
        """The server took a renewal that was sent at `sent_s`."""
        self._until_s = max(self._until_s, sent_s + self._term_s)

    def holds(self, now_s: float) -> bool:
        """Whether no newcomer can have taken the lease yet."""
        return now_s < self._until_s
