"""Decides how many foreign messages to read, and which. Pure; time and randomness are arguments.

In a small swarm, *follow* every message in order. When the backlog is more than the budget covers
in `CATCH_UP_S`, *draw* random positions of the stream instead and jump to its end, so that a node's
cost does not grow with the swarm and it sees a fair sample of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

CATCH_UP_S = 10.0


class TokenBucket:
    """At most `rate_per_s` on average, and `burst` at once."""

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, burst)
        self._tokens = self._burst
        self._updated_s = now_s

    def available(self, now_s: float) -> int:
        """Whole tokens that can be taken now. A clock that jumps back adds nothing."""
        elapsed_s = max(0.0, now_s - self._updated_s)
        self._updated_s = max(self._updated_s, now_s)
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._rate_per_s)
        return int(self._tokens)

    def take(self, count: int) -> None:
        """Use tokens. Taking more than are available causes a debt, which must be paid back before
        tokens are available again.
        """
        self._tokens -= count

    def give_back(self, count: int) -> None:
        """Return tokens that were not used."""
        self._tokens = min(self._burst, self._tokens + count)


@dataclass(frozen=True, slots=True)
class IntakePlan:
    """What to read now and where to move the shared cursor. Follow: the messages in `(cursor,
    next_cursor]`. Draw: `positions`.
    """

    mode: Literal["idle", "follow", "draw"]
    next_cursor: int
    positions: tuple[int, ...] = ()


def plan_intake(*, cursor: int, first_seq: int, last_seq: int, allowed: int, rate_per_s: float, random: Random) -> IntakePlan:
    """What to read next.

    Args:
        cursor: Everything up to this sequence was examined or skipped.
        first_seq: The oldest message kept.
        last_seq: The newest message. If it is below the cursor, the stream was created anew and is
            followed from its start.
        allowed: How many messages may be read now (`TokenBucket`).
        rate_per_s: The budget, which decides when the backlog is too large to follow.
    """
    if last_seq < cursor:
        cursor = 0
    start = max(cursor + 1, first_seq, 1)
    backlog = last_seq - start + 1
    if backlog <= 0 or allowed <= 0:
        return IntakePlan("idle", cursor)
    if backlog <= max(1.0, rate_per_s * CATCH_UP_S):
        return IntakePlan("follow", min(start + allowed - 1, last_seq))
    oldest = max(first_seq, 1)
    positions = random.sample(range(oldest, last_seq + 1), min(allowed, last_seq - oldest + 1))
    return IntakePlan("draw", last_seq, tuple(sorted(positions)))
