"""Which waiting message is looked at next, so that no sender takes what others need: pure, time is an argument.

Each sender has a queue and a token bucket. Queues are served in turn, which gives every sender the same share of the budget and
leaves what one does not use to the others (max-min fairness); the bucket limits a sender also when nobody else is there. When too
much waits, the sender that takes up the most room loses its oldest. The sender is what the subject says, before any check:
what turns out to be a forgery is given back (`refund`), so that forging costs its victim nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.verifier.intake_plan import TokenBucket

MAX_WAITING = 512
MAX_WAITING_BYTES = 64 * 2**20
MAX_SENDERS = 1024

T = TypeVar("T")


@dataclass(slots=True)
class _Sender(Generic[T]):
    bucket: TokenBucket
    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    size_bytes: int = 0

    @property
    def room(self) -> float:
        """What it takes of the two bounds together."""
        return self.size_bytes / MAX_WAITING_BYTES + len(self.waiting) / MAX_WAITING


class FairQueue(Generic[T]):
    """Messages by sender: `rate_per_s` for all together, `max_share` of it for each, `burst_s` seconds of both at once."""

    def __init__(self, rate_per_s: float, max_share: float, burst_s: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s * max_share
        self._burst_s = burst_s
        self._budget = TokenBucket(rate_per_s, rate_per_s * burst_s, now_s)
        self._senders: OrderedDict[str, _Sender[T]] = OrderedDict()
        self._waiting = 0
        self._size_bytes = 0

    def __len__(self) -> int:
        """How many messages wait."""
        return self._waiting

    def offer(self, sender: str, message: T, size_bytes: int, now_s: float) -> list[tuple[str, T]]:
        """Put a message in line. Returns those that had to give way, with their senders."""
        line = self._line(sender, now_s)
        line.waiting.append((message, size_bytes))
        self._count(line, 1, size_bytes)
        dropped: list[tuple[str, T]] = []
        while self._waiting > MAX_WAITING or (self._size_bytes > MAX_WAITING_BYTES and self._waiting > 1):
            name = max(self._senders, key=lambda name: self._senders[name].room)
            lost, lost_bytes = self._senders[name].waiting.popleft()
            self._count(self._senders[name], -1, -lost_bytes)
            dropped.append((name, lost))
        return dropped

    def next(self, now_s: float) -> tuple[str, T] | None:
        """The next message and its sender, None when nobody may go on now."""
        if not self._waiting or self._budget.available(now_s) < 1:
            return None
        for name in list(self._senders):
            line = self._senders[name]
            if line.waiting and line.bucket.available(now_s) >= 1:
                self._senders.move_to_end(name)
                self._budget.take(1)
                line.bucket.take(1)
                message, size_bytes = line.waiting.popleft()
                self._count(line, -1, -size_bytes)
                return name, message
        return None

    def refund(self, sender: str, *, blameless: bool) -> None:
        """Give the budget back what a message took that was refused cheaply.

        `blameless`: give it back to the sender too, who may not have sent it.
        """
        self._budget.give_back()
        if blameless and sender in self._senders:
            self._senders[sender].bucket.give_back()

    def may_go_on(self, now_s: float) -> bool:
        """Whether `next` would give a message."""
        if not self._waiting or self._budget.available(now_s) < 1:
            return False
        return any(line.waiting and line.bucket.available(now_s) >= 1 for line in self._senders.values())

    def _line(self, sender: str, now_s: float) -> _Sender[T]:
        line = self._senders.get(sender)
        if line is None:
            self._forget_idle()
            bucket = TokenBucket(self._rate_per_s, self._rate_per_s * self._burst_s, now_s)
            line = self._senders[sender] = _Sender(bucket)  # last in turn, so that a new name is no way to the front
        return line

    def _forget_idle(self) -> None:
        while len(self._senders) >= MAX_SENDERS:
            idle = next((name for name, line in self._senders.items() if not line.waiting), None)
            if idle is None:
                return
            del self._senders[idle]

    def _count(self, line: _Sender[T], messages: int, size_bytes: int) -> None:
        line.size_bytes += size_bytes
        self._waiting += messages
        self._size_bytes += size_bytes
