"""What a server says of what it keeps: messages, and the states of streams and consumers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StreamState:
    """State of a stream. `last_seq` counts every message it ever stored; `first_seq` is the oldest
    kept. `at`: the server's clock at the time of the answer (Unix time), None if it does not report
    it. `size_bytes`: None if this user may not ask for it. `created`: when the stream was created,
    in the server's words; empty if that is unknown. It differs after a restore.
    """

    first_seq: int
    last_seq: int
    messages: int
    size_bytes: int | None
    at: float | None = None
    created: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """Lag of a consumer: `pending` messages not yet delivered, `ack_pending` delivered but not yet
    acknowledged.
    """

    pending: int
    ack_pending: int
    redelivered: int


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in a stream. `inline` is None if the payload was stored as a blob; use
    `Transport.payload`.
    """

    stream: str
    seq: int
    subject: str
    size_bytes: int
    stored_at: float
    inline: bytes | None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ends:
    """The oldest and the newest message of a stream from some sequence on, and how many there are,
    as direct gets tell. A stream that keeps none has no ends, whatever it stored before. `last` is
    also None if it was not asked for.
    """

    first: StoredMessage | None = None
    last: StoredMessage | None = None
    messages: int = 0

    @property
    def first_seq(self) -> int:
        """The oldest message's sequence; 0 without messages."""
        return 0 if self.first is None else self.first.seq

    @property
    def last_seq(self) -> int:
        """The newest message's sequence; 0 without one."""
        return 0 if self.last is None else self.last.seq
