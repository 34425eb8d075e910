"""The interface every service is written against: streams, work queues, direct reads and small
shared state.

`shared.transport.nats.transport.NatsTransport` implements it, and
`tests/integration/test_transport_*.py` hold it to its promises.

Large payloads: a payload above the server's message limit is stored in chunks in a companion stream
(`<stream>_BLOBS`) and the message carries a reference (a claim check). On read,
`StoredMessage.size_bytes` is known at once and `Transport.payload` assembles and checks the bytes,
so that a receiver can refuse an over-large foreign message before fetching it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, get_args

from shared.atomic_files import Waits


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


ErrorKind = Literal["unreachable", "slow_consumer", "permissions", "access_denied", "malformed", "unanswered", "other"]
"""unreachable: the connection broke, or an attempt to connect failed. slow_consumer: this client
dropped messages. permissions: the server forbade a subject. access_denied: it refused this
process's key, or its identity could not be verified. malformed: a message that cannot be parsed, or
invalid data from the server. unanswered: a request without an answer before its deadline. other:
any other error of the server or the client.
"""

ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)


@dataclass(slots=True)
class Counters:
    """Counts since a connection was opened. stores: waits until the server had stored a message,
    which it does before it answers.
    """

    connects: int = 0
    reconnects: int = 0
    errors: dict[ErrorKind, int] = field(default_factory=lambda: dict.fromkeys(ERROR_KINDS, 0))
    stores: Waits = field(default_factory=Waits)


class TransportError(Exception):
    """Communication with the server failed; the message names cause and remedy."""


class NotConnected(TransportError):
    """The server cannot be reached or no stream answers. The caller may try again later.

    `cause`: the message without the `remedy`, for those who know a better one.
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause}: {remedy}" if remedy else cause)
        self.cause = cause


class NoStream(NotConnected):
    """Nobody answers for the stream: it does not exist there, or the server is still starting."""


class StreamMissing(TransportError):
    """The server says that it has no such stream."""


class AccessDenied(TransportError):
    """The server refuses this process's key, its identity cannot be verified, or a key file cannot
    be used. Waiting does not help. `key_refused`: a server that was verified refused the key.
    """

    def __init__(self, message: str, *, key_refused: bool = False) -> None:
        super().__init__(message)
        self.key_refused = key_refused


class Conflict(TransportError):
    """Another writer was first: a compare-and-set (`KeyValue.update`, `expected_last_seq`) or a
    write to a subject that takes one message (`StreamSpec.write_once`).
    """


class StreamFull(TransportError):
    """The stream refuses new messages (`discard: new` at its limit), because the reader is behind.
    Wait and publish again.
    """


class TooLarge(TransportError):
    """The payload is larger than its stream will ever accept: `limit_bytes`; None if only the
    server knows the limit.
    """

    def __init__(self, message: str, limit_bytes: int | None = None) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes


class BadReference(TransportError):
    """A message refers to its payload in a way that no honest publisher does. Reading it again will
    not help.
    """


class Retention(Enum):
    """Time for which a stream keeps a message: until a limit (`LIMITS`) or until it is acknowledged
    (`WORK_QUEUE`).
    """

    LIMITS = "limits"
    WORK_QUEUE = "workqueue"


class Lowering(Enum):
    """Treatment of replicas, size limits and ages that `ensure_stream` would lower. All other
    settings are always updated.

    Lowering a limit deletes messages at once, and missing replicas are noticed only when a machine
    fails. So neither may be the side effect of a setting that somebody forgot (`nats.replicas`
    defaults to 1).
    """

    APPLY = "apply"
    """Lower them, as the caller intends."""
    KEEP = "keep"
    """Leave them higher and log it. For services, which do not decide about streams."""
    REFUSE = "refuse"
    """Leave the stream unchanged and raise `WouldLower`. For commands, where a person decides."""
    LOOK = "look"
    """Create and change nothing; raise `WouldLower` in the same cases as `REFUSE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """The settings that a stream's owner wants. `ensure_stream` applies them, also to an existing
    stream with other settings.
    """

    name: str
    subjects: tuple[str, ...]
    retention: Retention = Retention.LIMITS
    discard_new: bool = False
    """True: a full stream refuses messages (back-pressure). False: it deletes its oldest one."""
    max_age_s: float = 0.0
    max_bytes: int = -1
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    """Messages kept per subject, after which that subject's oldest is deleted, so that a publisher
    on one subject takes no room from others. -1: leave unchanged.
    """
    max_msg_bytes: int = -1
    """Largest payload, also of one that is stored as chunks. -1: no limit of its own."""
    duplicate_window_s: float = 120.0
    """A server holds all ids of this time in memory, so it must be short where strangers write."""
    deny_delete: bool = False
    deny_purge: bool = False
    write_once: bool = False
    """Each subject takes one message, which stays: the server refuses a second one, deletes and
    purges. Needs `discard_new`.
    """
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
    """The server has stored the message at `seq`, or already had it (`duplicate`)."""

    seq: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class KvEntry:
    """A value with its revision, which a later `KeyValue.update` must name. `stored_at`: Unix time
    in seconds, by the server's clock.
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
        max_bytes: int = 0,
        max_values: int = 0,
        duplicate_window_s: float = 120.0,
        replicas: int = 1,
        lowering: Lowering = Lowering.APPLY,
    ) -> None:
        """Create the bucket, or update it if its settings differ. `lowering` and
        `duplicate_window_s`: as for a stream. `max_value_bytes`: largest value; `max_bytes`,
        `max_values`: of the bucket, older values of its keys included; 0: any. A full bucket
        refuses new keys (StreamFull), but a key with its whole history goes on.

        A limit that an existing bucket did not have yet is set whatever `lowering` says, because
        a bucket deletes nothing for it.
        """
        ...

    async def buckets(self) -> Sequence[str]:
        """Names of all buckets, sorted. For commands that people run, not for services."""
        ...

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        """The newest value of `key`."""
        ...

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write unconditionally. Returns the new revision."""
        ...

    async def update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        """Write if the newest revision is still `last_revision` (0: the key must not exist). Raises
        Conflict otherwise.
        """
        ...

    async def newest(self, bucket: str, limit: int, prefix: str = "") -> tuple[Sequence[KvEntry], int]:
        """Of the keys that start with `prefix`, those written last, newest first, at most `limit`
        of them, and the number of others, 0 only if there are none.

        The cost does not grow with the bucket, so anybody may write in it. The number is
        exact for up to 1,024 keys of at most 16 MiB, and otherwise an estimate that counts older
        values too.
        """
        ...

    def watch(self, bucket: str, key: str, *, poll_s: float = 2.0) -> AsyncIterator[KvEntry]:
        """Each new value of `key`, beginning with the present one. Combines the server's
        notifications with polling every `poll_s`, because a watch can die unnoticed. Values may be
        skipped, but never the newest. Ends only by cancellation.
        """
        ...


class Fence(Protocol):
    """Decides about the writes of a process; the lease of its name is one (`shared.lease`)."""

    async def writable(self) -> None:
        """Return if this process may write now. Raises NotConnected."""
        ...

    def owns(self, bucket: str, key: str) -> bool:
        """Check whether only this process writes the key, so that `put` must write it."""
        ...

    async def put(self, key: str, value: bytes) -> int:
        """Write a key that it owns. Returns the new revision."""
        ...


class Transport(Protocol):
    """One connection to one plane. Every call has a deadline; failures are `TransportError`s.

    A call may be cancelled wherever it waits. It then raises CancelledError, even if the answer
    came at the same moment, so its effect may have happened. A message on its way to a cancelled
    `pull.fetch` is delivered again.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def counters(self) -> Counters: ...

    @property
    def certificate_expires_at(self) -> float | None:
        """Unix time at which the server's certificate expires; None without a certificate."""
        ...

    @property
    def kv(self) -> KeyValue: ...

    def fenced(self, fence: Fence) -> Transport:
        """The same connection, where `fence` is asked before every write, and before work is taken
        from a queue (`shared.transport.nats.pull`), because after a loss the messages are another
        process's to work on.
        """
        ...

    async def close(self) -> None:
        """Flush what was published, then disconnect. Safe to call twice."""
        ...

    async def ensure_stream(self, spec: StreamSpec, lowering: Lowering = Lowering.APPLY) -> None:
        """Create the stream, or update it if it differs from `spec`. Idempotent, and safe from
        several processes at once.

        Raises:
            WouldLower: the update would lower replicas, size limits or ages, and `lowering` refuses
                that.
        """
        ...

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> None:
        """Create the durable consumer, or update it if it differs from `spec`."""
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

        A publish that timed out is tried again with the same `message_id` until `timeout_s` has
        passed. What the server had stored is stored again only outside its duplicate window.

        Raises:
            Conflict: the stream's last sequence is not `expected_last_seq`, or the subject of a
                `write_once` stream has its message.
            StreamFull: a `discard_new` stream is at its limit.
            TooLarge: the payload exceeds the stream's `max_msg_bytes`.
            NotConnected: no acknowledgement within `timeout_s`.
        """
        ...

    async def payload(self, message: StoredMessage) -> bytes:
        """The payload. If it was stored as a blob, it is fetched and checked against its hash.

        Raises:
            BadReference: what the message says about its payload is impossible.
            NotConnected: it did not arrive before a deadline that grows with its size.
            TransportError: a chunk is missing or the hash differs.
        """
        ...

    async def read(self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0) -> list[StoredMessage]:
        """Messages at or after `start_seq` in order, by (batched) direct get without a consumer.
        Empty if there are none.

        After `timeout_s` it returns what has arrived.
        """
        ...

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        """The message at exactly `seq`, or None if it has been deleted or does not exist yet."""
        ...

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The newest message on `subject`."""
        ...

    async def next(self, stream: str, subject: str, start_seq: int) -> StoredMessage | None:
        """The oldest message on `subject` at or after `start_seq`."""
        ...

    async def ends(self, stream: str, start_seq: int = 1, timeout_s: float = 5.0, *, newest: bool = True) -> Ends:
        """The oldest message at or after `start_seq`, the newest, and how many there are, by direct
        gets. Both come with their bodies; with `newest` false, the newest is left out. Raises
        NoStream.
        """
        ...

    async def stream_state(self, stream: str) -> StreamState:
        """State of a stream. Only an operator may ask a secured swarm's server, which serves one
        such request after the other: not for hot loops.
        """
        ...

    async def counts(self, stream: str, subject: str) -> Mapping[str, int]:
        """Count the messages that the stream keeps on each subject that matches `subject`, for up
        to about 100,000 subjects. Too expensive for hot loops.
        """
        ...

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """Lag of a consumer. Too expensive for hot loops."""
        ...

    async def purge(self, stream: str, up_to_seq: int) -> None:
        """Delete messages with sequence <= `up_to_seq`."""
        ...


class WouldLower(TransportError):
    """A stream has more replicas, larger limits or longer ages than are wanted, and lowering them
    was not requested.
    """

    def __init__(self, stream: str, wanted: Mapping[str, Any], actual: Mapping[str, Any], lowered: Collection[str]) -> None:
        differences = ", ".join(f"{name} from {_shown(actual.get(name))} to {wanted[name]}" for name in lowered)
        super().__init__(f"stream {stream} was left unchanged: this would lower {differences}")


def lowered(wanted: Mapping[str, Any], actual: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """The settings among `names` that an update from `actual` to `wanted` would lower.

    Missing, zero and negative values mean "no limit", as for a NATS server.
    """
    return [name for name in names if _is_lower(wanted.get(name), actual.get(name))]


def _is_lower(wanted: float | None, actual: float | None) -> bool:
    if wanted is None or wanted <= 0:
        return False
    return actual is None or actual <= 0 or wanted < actual


def _shown(value: float | None) -> str:
    return "no limit" if value is None or value <= 0 else str(value)


class Deadline:
    """A point in time by which an operation must have ended."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - self._loop.time())

    @property
    def passed(self) -> bool:
        return self.left_s <= 0.0


_STREAM_PREFIX = "KV_"
"""A bucket is a stream, and each key is one of its subjects (ADR-8)."""


def bucket_stream(bucket: str) -> str:
    """Name of the stream that holds the bucket."""
    return f"{_STREAM_PREFIX}{bucket}"


def bucket_of_stream(stream: str) -> str:
    """Inverse of `bucket_stream`."""
    return stream.removeprefix(_STREAM_PREFIX)
