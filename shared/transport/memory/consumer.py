"""A consumer's delivered but unacknowledged messages: JetStream's rules as plain state, for
`memory`. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.transport.base import ConsumerSpec, ConsumerState, StoredMessage


@dataclass(slots=True)
class _Pending:
    """A delivered message: when it is due again, and how often it was delivered."""

    due_at: float
    deliveries: int


class MemoryConsumer:
    """A durable consumer of one stream. The messages belong to the stream, by sequence, in
    order.
    """

    def __init__(self, spec: ConsumerSpec, now: Callable[[], float]) -> None:
        self.spec = spec
        self._now = now
        self._next_seq = 1
        self._pending: dict[int, _Pending] = {}

    def hand_out(self, messages: Mapping[int, StoredMessage], max_messages: int) -> list[tuple[StoredMessage, int]]:
        """The next messages with their delivery counts: first those that are due again, then new
        ones.
        """
        spec, now = self.spec, self._now()
        handed: list[tuple[StoredMessage, int]] = []
        for seq, pending in sorted(self._pending.items()):
            if pending.due_at > now or len(handed) >= max_messages:
                continue
            if 0 < spec.max_deliver <= pending.deliveries or seq not in messages:
                del self._pending[seq]
                continue
            pending.deliveries += 1
            pending.due_at = now + spec.ack_wait_s
            handed.append((messages[seq], pending.deliveries))
        for seq, message in messages.items():
            if len(handed) >= max_messages or 0 < spec.max_ack_pending <= len(self._pending):
                break
            if seq < self._next_seq:
                continue
            self._next_seq = seq + 1
            self._pending[seq] = _Pending(now + spec.ack_wait_s, 1)
            handed.append((message, 1))
        return handed

    def forget(self, seq: int) -> None:
        """The message was acknowledged or deleted."""
        self._pending.pop(seq, None)

    def due_in(self, seq: int, delay_s: float) -> None:
        """Deliver `seq` again after `delay_s`, if it is unacknowledged."""
        pending = self._pending.get(seq)
        if pending is not None:
            pending.due_at = self._now() + delay_s

    def restart_clock(self, seq: int) -> None:
        """Restart the acknowledgement clock of `seq`."""
        self.due_in(seq, self.spec.ack_wait_s)

    def state(self, messages: Mapping[int, StoredMessage]) -> ConsumerState:
        """Lag behind `messages`."""
        waiting = sum(1 for seq in messages if seq >= self._next_seq)
        redelivered = sum(1 for pending in self._pending.values() if pending.deliveries > 1)
        return ConsumerState(waiting, len(self._pending), redelivered)
