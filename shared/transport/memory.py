"""The transport without a server, for tests and for trying out services in one process. See `base` for what it promises."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from shared.transport import blobs, kv, reference
from shared.transport.base import (
    ConsumerSpec,
    ConsumerState,
    Delivery,
    KvEntry,
    NotConnected,
    PubAck,
    Retention,
    StoredMessage,
    StreamSpec,
    StreamState,
    TransportError,
)
from shared.transport.counters import Counters
from shared.transport.deadline import Deadline
from shared.transport.memory_server import MemoryBucket, MemoryServer, MemoryStream
from shared.transport.pull import LONGEST_PULL_S

_REDELIVERY_CHECK_S = 0.02
_shared: dict[str, MemoryServer] = {}


def shared_server(name: str) -> MemoryServer:
    """The server that `memory://name` means in this process; made at its first use."""
    return _shared.setdefault(name, MemoryServer())


class MemoryDelivery:
    """See `base.Delivery`."""

    def __init__(self, transport: MemoryTransport, consumer: str, message: StoredMessage, deliveries: int) -> None:
        self._transport = transport
        self._consumer = consumer
        self._message = message
        self._deliveries = deliveries
        self._settled = False

    @property
    def message(self) -> StoredMessage:
        """The message."""
        return self._message

    @property
    def deliveries(self) -> int:
        """How many times it was handed out, this time included."""
        return self._deliveries

    async def ack(self) -> None:
        """Done."""
        if not self._settled:
            self._settled = True
            await self._transport.settle(self._message, self._consumer)

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back."""
        if not self._settled:
            self._settled = True
            self._transport.hand_out_again(self._message, self._consumer, delay_s)

    async def in_progress(self) -> None:
        """Restart the acknowledgement clock."""
        if not self._settled:
            self._transport.restart_clock(self._message, self._consumer)


class MemoryTransport:
    """A connection to a `MemoryServer`."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._closed = False
        self.counters = Counters(connects=1)

    @property
    def connected(self) -> bool:
        """False once closed."""
        return not self._closed

    @property
    def inline_limit_bytes(self) -> int:
        """Payloads above this become blobs."""
        return self._server.max_payload_bytes

    async def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create or update the stream and its companion for blobs; sweep chunks that no message refers to."""
        self._open().ensure_stream(spec)
        companion = blobs.companion(spec)
        if companion is not None:
            self._open().ensure_stream(companion)
            if not spec.deny_purge:
                self._sweep(spec.name)

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> None:
        """Create or update the durable consumer."""
        self._stream(stream).ensure_consumer(spec)

    async def ensure_bucket(self, bucket: str, *, history: int = 1, ttl_s: float = 0.0, replicas: int = 1) -> None:
        """Create or update the bucket. `history` and `replicas` change nothing here: only newest values can be read."""
        server = self._open()
        server.buckets.setdefault(bucket, MemoryBucket(ttl_s, server.now)).ttl_s = ttl_s

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
        """Store a message in `stream`; see `base.Transport.publish`."""
        target = self._stream(stream)
        target.check(subject, len(payload))
        extra = {**(headers or {}), "Nats-Msg-Id": message_id}
        if len(payload) <= self.inline_limit_bytes:
            ack = target.store(subject, payload, extra, expected_last_seq)
        else:
            blob = await blobs.put(self, subject, payload, stream=stream, chunk_bytes=self.inline_limit_bytes, timeout_s=timeout_s)
            extra[reference.BLOB_HEADER] = blob.header()
            try:
                ack = target.store(subject, b"", extra, expected_last_seq)
            except TransportError:
                await blobs.drop(self, stream, blob.chunks)
                raise
            if ack.duplicate:
                await blobs.drop(self, stream, blob.chunks)
        self._server.changed()
        return ack

    async def fetch(self, stream: str, consumer: str, max_messages: int, timeout_s: float) -> list[Delivery]:
        """Up to `max_messages` from a durable consumer."""
        deadline = Deadline(min(timeout_s, LONGEST_PULL_S))
        while True:
            handed = self._stream(stream).hand_out(consumer, max_messages)
            if handed or deadline.passed:
                return [MemoryDelivery(self, consumer, message, deliveries) for message, deliveries in handed]
            await self._server.change(min(_REDELIVERY_CHECK_S, deadline.left_s))

    async def payload(self, message: StoredMessage) -> bytes:
        """The payload, assembled and checked if it is a blob."""
        if message.inline is not None:
            return message.inline
        blob = reference.reference_of(message)
        if blob is None:
            raise TransportError(f"message {message.seq} of {message.stream} has neither a payload nor a reference to one")
        return await blobs.fetch(self, message, blob, timeout_s=LONGEST_PULL_S)

    async def read(
        self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0, *, max_bytes: int | None = None
    ) -> list[StoredMessage]:
        """Messages at or after `start_seq`."""
        return self._stream(stream).read(start_seq, max_messages, max_bytes)

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        """The message at exactly `seq`."""
        return self._stream(stream).get(seq)

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The newest message on `subject`."""
        return self._stream(stream).last(subject)

    async def stream_state(self, stream: str) -> StreamState:
        """Fill of a stream."""
        return self._stream(stream).state()

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """Lag of a consumer."""
        return self._stream(stream).consumer_state(consumer)

    async def purge(self, stream: str, up_to_seq: int) -> None:
        """Forget messages up to `up_to_seq`, and chunks that belonged to them."""
        self._stream(stream).purge(up_to_seq)
        if blobs.companion_name(stream) in self._server.streams:
            self._sweep(stream)

    async def delete(self, stream: str, seq: int) -> None:
        """Forget one message and its chunks."""
        message = self._stream(stream).get(seq)
        self._stream(stream).delete(seq)
        if message is not None:
            await self._drop_chunks(message)

    async def buckets(self) -> Sequence[str]:
        """Names of all key-value buckets, sorted."""
        return sorted(self._server.buckets)

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None:
        """The newest value of `key`."""
        kv.subject(bucket, key)
        return self._bucket(bucket).get(key)

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        """Write, last writer wins."""
        return self._kv_write(bucket, key, value, None)

    async def kv_update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        """Write if the newest revision is still `last_revision`."""
        return self._kv_write(bucket, key, value, last_revision)

    async def kv_all(self, bucket: str, prefix: str = "") -> Sequence[KvEntry]:
        """Newest value of every key that starts with `prefix`."""
        return self._bucket(bucket).all(prefix)

    async def kv_newest(self, bucket: str, limit: int) -> tuple[Sequence[KvEntry], int]:
        """The keys written last, and how many others there are."""
        entries = sorted(self._bucket(bucket).all(""), key=lambda found: -found.revision)
        return entries[:limit], max(0, len(entries) - limit)

    async def kv_watch(self, bucket: str, key: str, *, poll_s: float = 2.0) -> AsyncIterator[KvEntry]:
        """Each new value of `key`, the present one first."""
        revision = 0
        while True:
            with suppress(NotConnected):
                entry = self._bucket(bucket).get(key)
                if entry is not None and entry.revision != revision:
                    revision = entry.revision
                    yield entry
                    continue
            await self._server.change(poll_s)

    async def put_chunk(self, subject: str, chunk: bytes, *, stream: str, timeout_s: float) -> int:
        """Store one chunk of a blob (see `blobs.ChunkStore`)."""
        target = self._stream(stream)
        target.check(subject, len(chunk))
        return target.store(subject, chunk, {"Nats-Msg-Id": uuid.uuid4().hex}, None).seq

    async def drop(self, stream: str, seq: int) -> None:
        """Forget one message, leaving its chunks."""
        self._stream(stream).delete(seq)

    async def settle(self, message: StoredMessage, consumer: str) -> None:
        """A delivery is done with."""
        stream = self._stream(message.stream)
        stream.settle(consumer, message.seq)
        if stream.spec.retention is Retention.WORK_QUEUE:
            await self._drop_chunks(message)

    def hand_out_again(self, message: StoredMessage, consumer: str, delay_s: float) -> None:
        """A delivery was given back."""
        self._stream(message.stream).due_in(consumer, message.seq, delay_s)
        self._server.changed()

    def restart_clock(self, message: StoredMessage, consumer: str) -> None:
        """A delivery is still being worked on."""
        stream = self._stream(message.stream)
        stream.due_in(consumer, message.seq, stream.consumer(consumer).spec.ack_wait_s)

    def _open(self) -> MemoryServer:
        if self._closed:
            raise NotConnected("this transport was closed: connect again")
        return self._server

    def _stream(self, name: str) -> MemoryStream:
        return self._open().stream(name)

    def _bucket(self, name: str) -> MemoryBucket:
        return self._open().bucket(name)

    def _kv_write(self, bucket: str, key: str, value: bytes, last_revision: int | None) -> int:
        kv.subject(bucket, key)
        revision = self._bucket(bucket).put(key, value, last_revision)
        self._server.changed()
        return revision

    def _sweep(self, stream: str) -> None:
        oldest = self._stream(stream).read(1, 1)
        before = blobs.sweep_before(oldest[0].stored_at if oldest else None, self._server.now())
        companion = self._stream(blobs.companion_name(stream))
        stale = [chunk.seq for chunk in companion.read(1, companion.state().messages) if chunk.stored_at < before]
        if stale:
            companion.purge(stale[-1])

    async def _drop_chunks(self, message: StoredMessage) -> None:
        if message.inline is None:
            with suppress(TransportError):
                blob = reference.reference_of(message)
                await blobs.drop(self, message.stream, blob.chunks if blob else ())
