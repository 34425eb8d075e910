"""The interface every service is written against: streams, work queues, direct reads and small
shared state.

Two implementations keep the same promises and pass the same tests
(`tests/integration/test_transport_*.py`):
`shared.transport.nats.transport.NatsTransport` and
`shared.transport.memory.transport.MemoryTransport`.

Large payloads: a payload above the server's message limit is stored in chunks in a companion stream
(`<stream>_BLOBS`) and the message carries a reference (a claim check). On read,
`StoredMessage.size_bytes` is known at once and `Transport.payload` assembles and checks the bytes,
so that a receiver can refuse an over-large foreign message before fetching it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from shared.transport.counters import Counters

LONGEST_FETCH_S = 5.0
"""A `Transport.fetch` waits no longer, whatever its `timeout_s`."""


class TransportError(Exception):
    """Something went wrong between this process and the server; the message names cause and
    remedy.
    """


class NotConnected(TransportError):
    """The server cannot be reached or no stream answers. The caller may try again later."""


class AccessDenied(TransportError):
    """The server refuses this process's key, is not who it should be, or a key file cannot be used.
    Waiting does not help.
    """


class Conflict(TransportError):
    """A compare-and-set (`KeyValue.update`, `expected_last_seq`) lost against another writer."""


class StreamFull(TransportError):
    """The stream refuses new messages (`discard: new` at its limit): the reader is behind. Wait and
    publish again.
    """


class TooLarge(TransportError):
    """The payload is larger than its stream will ever take: `limit_bytes`, None where only the
    server knows it.
    """

    def __init__(self, message: str, limit_bytes: int | None = None) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes


class BadReference(TransportError):
    """A message refers to its payload in a way that no publisher of ours does: reading it again
    will not help.
    """


class Retention(Enum):
    """How long a stream keeps a message: until a limit (`LIMITS`) or until it is acknowledged
    (`WORK_QUEUE`).
    """

    LIMITS = "limits"
    WORK_QUEUE = "workqueue"


class Lowering(Enum):
    """What `ensure_stream` does about copies, room and time that it would lower
    (`shared.transport.lowering`). Everything else it always updates.
    """

    APPLY = "apply"
    """Lower them: the caller means it."""
    KEEP = "keep"
    """Leave them higher and log that: right for a service, which decides about no stream."""
    REFUSE = "refuse"
    """Leave the stream alone and raise `WouldLower`: right where a person can decide."""
    LOOK = "look"
    """Create and change nothing; raise `WouldLower` where `REFUSE` would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """A stream as its owner wants it. `ensure_stream` makes it so, also when it already exists with
    other settings.
    """

    name: str
    subjects: tuple[str, ...]
    retention: Retention = Retention.LIMITS
    discard_new: bool = False
    """True: a full stream refuses (back-pressure). False: it forgets its oldest message."""
    max_age_s: float = 0.0
    max_bytes: int = -1
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    """Kept of one subject; its oldest goes, so that who writes to one subject only takes room from
    nobody else. -1: as it is.
    """
    max_msg_bytes: int = -1
    """Largest payload a publisher may send, claim checks included. -1: no limit of its own."""
    duplicate_window_s: float = 120.0
    deny_delete: bool = False
    deny_purge: bool = False
    replicas: int = 1
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """A durable pull consumer with explicit acknowledgement."""

    name: str
    ack_wait_s: float
    max_deliver: int
    max_ack_pending: int


@dataclass(frozen=True, slots=True)
class PubAck:
    """The server has stored the message at `seq`, or had it already (`duplicate`)."""

    seq: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class StreamState:
    """Fill of a stream. `last_seq` counts every message it ever took; `first_seq` is the oldest
    kept. `at`: the server's clock when it said so (Unix time), None where it does not tell.
    """

    first_seq: int
    last_seq: int
    messages: int
    size_bytes: int
    at: float | None = None


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """Lag of a consumer: `pending` not yet delivered, `ack_pending` delivered and not yet
    acknowledged.
    """

    pending: int
    ack_pending: int
    redelivered: int


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it lies in a stream. `inline` is None when the payload was stored as a blob; use
    `Transport.payload`.
    """

    stream: str
    seq: int
    subject: str
    size_bytes: int
    stored_at: float
    inline: bytes | None
    headers: Mapping[str, str] = field(default_factory=dict)


class Delivery(Protocol):
    """A message handed to one reader of a work queue. The first of `ack` and `nak` takes effect,
    later calls do nothing.
    """

    @property
    def message(self) -> StoredMessage:
        """The message."""
        ...

    @property
    def deliveries(self) -> int:
        """How many times it was handed out, this time included (1 for the first)."""
        ...

    async def ack(self) -> None:
        """Done. Returns after the server has confirmed (a double ack)."""
        ...

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back, to be handed out again after `delay_s`."""
        ...

    async def in_progress(self) -> None:
        """Restart the acknowledgement clock."""
        ...


@dataclass(frozen=True, slots=True)
class KvEntry:
    """A value with the revision that a later `KeyValue.update` must name. `stored_at`: Unix time in
    seconds, by the server's clock.
    """

    key: str
    value: bytes
    revision: int
    stored_at: float = field(default=0.0, compare=False)


class KeyValue(Protocol):
    """Small shared state: the newest value of each key of a bucket, with compare-and-set and
    watches.
    """

    async def ensure(
        self,
        bucket: str,
        *,
        history: int = 1,
        ttl_s: float = 0.0,
        max_value_bytes: int = 0,
        replicas: int = 1,
        lowering: Lowering = Lowering.APPLY,
    ) -> None:
        """Create the bucket, or update it where it differs. `lowering`: as for a stream.
        `max_value_bytes`: largest value, 0: any.
        """
        ...

    async def buckets(self) -> Sequence[str]:
        """Names of all buckets, sorted. For people who look, not for services."""
        ...

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        """The newest value of `key`."""
        ...

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write, last writer wins. Returns the new revision."""
        ...

    async def update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        """Write if the newest revision is still `last_revision` (0: the key must not exist). Raises
        Conflict otherwise.
        """
        ...

    async def all(self, bucket: str, prefix: str = "") -> Sequence[KvEntry]:
        """Newest value of every key that starts with `prefix`."""
        ...

    async def newest(self, bucket: str, limit: int) -> tuple[Sequence[KvEntry], int]:
        """The keys written last, newest first, at most `limit` of them, and how many others there
        are.

        For a bucket in which strangers write: what it costs does not grow with the bucket.
        """
        ...

    def watch(self, bucket: str, key: str, *, poll_s: float = 2.0) -> AsyncIterator[KvEntry]:
        """Each new value of `key`, the present one first. Pushes when the server does and polls
        every `poll_s` besides, because a watch can die without a word. Values may be skipped; the
        newest is never missed. Ends only by cancellation."""
        ...


class Transport(Protocol):
    """One connection to one plane. Every call has a deadline; failures are `TransportError`s.

    A call may be cancelled wherever it waits. It then raises CancelledError, also where the answer
    came at the same moment: what it was to do may have been done. A message on its way to a
    cancelled `fetch` is handed out again.
    """

    @property
    def connected(self) -> bool:
        """Whether the server can be reached now."""
        ...

    @property
    def counters(self) -> Counters:
        """Connections and errors since it was opened."""
        ...

    @property
    def certificate_expires_at(self) -> float | None:
        """Unix time at which the server's certificate runs out; None where there is none."""
        ...

    @property
    def kv(self) -> KeyValue:
        """The server's key-value buckets."""
        ...

    async def close(self) -> None:
        """Flush what was published, then disconnect. Safe to call twice."""
        ...

    async def ensure_stream(self, spec: StreamSpec, lowering: Lowering = Lowering.APPLY) -> None:
        """Create the stream, or update it where it differs from `spec`. Idempotent, safe from
        several processes at once.

        Raises:
            WouldLower: the update would lower copies, room or time, and `lowering` refuses that.
        """
        ...

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> None:
        """Create the durable consumer, or update it where it differs from `spec`."""
        ...

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        stream: str,
        message_id: str,
        expected_last_seq: int | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> PubAck:
        """Store a message in `stream` and wait for the acknowledgement.

        A publish that timed out may have been stored: it is tried again with the same `message_id`
        inside the stream's duplicate window, at most until `timeout_s` has passed.

        Raises:
            Conflict: the stream's last sequence is not `expected_last_seq`.
            StreamFull: a `discard_new` stream is at its limit.
            TooLarge: the payload exceeds the stream's `max_msg_bytes`.
            NotConnected: no acknowledgement within `timeout_s`.
        """
        ...

    async def fetch(self, stream: str, consumer: str, max_messages: int, timeout_s: float) -> list[Delivery]:
        """Up to `max_messages` from a durable consumer. Empty when none come in `timeout_s`
        (`LONGEST_FETCH_S` at most).
        """
        ...

    async def payload(self, message: StoredMessage) -> bytes:
        """The payload, fetched and checked against its hash when it was stored as a blob.

        Raises:
            BadReference: what the message says of its payload cannot be.
            NotConnected: it did not come before a deadline that grows with its size.
            TransportError: a chunk is gone or the hash differs.
        """
        ...

    async def read(self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0) -> list[StoredMessage]:
        """Messages at or after `start_seq` in order, by (batched) direct get: no consumer is made.
        Empty when there are none.

        Ends early with what has come when `timeout_s` is over.
        """
        ...

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        """The message at exactly `seq`, or None when it is gone or not yet there."""
        ...

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The newest message on `subject`."""
        ...

    async def stream_state(self, stream: str) -> StreamState:
        """Fill of a stream. Not for hot loops."""
        ...

    async def counts(self, stream: str, subject: str) -> Mapping[str, int]:
        """How many messages the stream keeps on each subject that matches `subject`, up to some
        100,000 of them. Not for hot loops.
        """
        ...

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """Lag of a consumer. Not for hot loops."""
        ...

    async def purge(self, stream: str, up_to_seq: int) -> None:
        """Forget messages with sequence <= `up_to_seq`."""
        ...

    async def delete(self, stream: str, seq: int) -> None:
        """Forget one message (a work-queue message that nobody will take any more)."""
        ...
