"""The in-memory transport, for tests and for trying out services in one process. `base` documents
its contract.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from shared.transport import blobs
from shared.transport.base import (
    LONGEST_FETCH_S,
    ConsumerSpec,
    ConsumerState,
    Counters,
    Deadline,
    Delivery,
    Ends,
    KeyValue,
    Lowering,
    PubAck,
    StoredMessage,
    StreamSpec,
    StreamState,
    TransportError,
)
from shared.transport.blobs import BLOB_HEADER
from shared.transport.memory.chunks import MemoryChunks
from shared.transport.memory.delivery import MemoryDelivery
from shared.transport.memory.key_value import MemoryKeyValue
from shared.transport.memory.link import MemoryLink
from shared.transport.memory.server import MemoryServer
from shared.transport.memory.stream import MemoryStream

_REDELIVERY_CHECK_S = 0.02
_shared: dict[str, MemoryServer] = {}


def shared_server(name: str) -> MemoryServer:
    """The server that `memory://name` names in this process, created at its first use."""
    return _shared.setdefault(name, MemoryServer())


class MemoryTransport:
    """A connection to a `MemoryServer`."""

    def __init__(self, server: MemoryServer) -> None:
        self._link = MemoryLink(server)
        self._chunks = MemoryChunks(self._link)
        self._kv = MemoryKeyValue(self._link)
        self.counters = Counters(connects=1)

    @property
    def connected(self) -> bool:
        """False once closed."""
        return not self._link.closed

    @property
    def certificate_expires_at(self) -> float | None:
        """None: nothing is encrypted within a process."""
        return None

    @property
    def kv(self) -> KeyValue:
        """The server's key-value buckets."""
        return self._kv

    async def close(self) -> None:
        """Refuse all further calls."""
        self._link.closed = True

    async def ensure_stream(self, spec: StreamSpec, lowering: Lowering = Lowering.APPLY) -> None:
        """Create or update the stream and its companion for blobs, and delete chunks that no
        message refers to.
        """
        self._link.server.ensure_stream(spec, lowering)
        companion = blobs.companion(spec)
        if companion is not None:
            self._link.server.ensure_stream(companion, lowering)
            if not spec.deny_purge and lowering is not Lowering.LOOK:
                self._chunks.sweep(spec.name)

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> None:
        """Create or update the durable consumer."""
        self._stream(stream).ensure_consumer(spec)

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
        inline_limit = self._link.server.max_payload_bytes
        extra = {**(headers or {}), "Nats-Msg-Id": message_id}
        if len(payload) <= inline_limit:
            ack = target.store(subject, payload, extra, expected_last_seq)
        else:
            blob = await blobs.put(self._chunks, subject, payload, stream=stream, chunk_bytes=inline_limit, timeout_s=timeout_s)
            extra[BLOB_HEADER] = blob.header()
            try:
                ack = target.store(subject, b"", extra, expected_last_seq)
            except TransportError:
                await blobs.drop(self._chunks, stream, blob.chunks)
                raise
            if ack.duplicate:
                await blobs.drop(self._chunks, stream, blob.chunks)
        self._link.server.changed()
        return ack

    async def fetch(self, stream: str, consumer: str, max_messages: int, timeout_s: float) -> list[Delivery]:
        """Up to `max_messages` from a durable consumer."""
        deadline = Deadline(min(timeout_s, LONGEST_FETCH_S))
        while True:
            handed = self._stream(stream).hand_out(consumer, max_messages)
            if handed or deadline.passed:
                return [MemoryDelivery(self._chunks, self._link, consumer, message, deliveries) for message, deliveries in handed]
            await self._link.change(min(_REDELIVERY_CHECK_S, deadline.left_s))

    async def payload(self, message: StoredMessage) -> bytes:
        """The payload, assembled and checked if it is a blob."""
        return await blobs.payload(self._chunks, message)

    async def read(self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0) -> list[StoredMessage]:
        """Messages at or after `start_seq`."""
        return self._stream(stream).read(start_seq, max_messages)

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        """The message at exactly `seq`."""
        return self._stream(stream).get(seq)

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The newest message on `subject`."""
        return self._stream(stream).last(subject)

    async def ends(self, stream: str, start_seq: int = 1, timeout_s: float = 5.0, *, newest: bool = True) -> Ends:
        """The oldest message at or after `start_seq` and the newest."""
        messages = self._stream(stream).read(start_seq, sys.maxsize)
        return Ends(messages[0], messages[-1] if newest else None, len(messages)) if messages else Ends()

    async def stream_state(self, stream: str) -> StreamState:
        """State of a stream."""
        return self._stream(stream).state()

    async def counts(self, stream: str, subject: str) -> Mapping[str, int]:
        """How many messages the stream keeps on each subject that matches."""
        return self._stream(stream).counts(subject)

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """Lag of a consumer."""
        return self._stream(stream).consumer_state(consumer)

    async def purge(self, stream: str, up_to_seq: int) -> None:
        """Delete messages up to `up_to_seq`, and their chunks."""
        self._stream(stream).purge(up_to_seq)
        if blobs.companion_name(stream) in self._link.server.streams:
            self._chunks.sweep(stream)

    async def delete(self, stream: str, seq: int) -> None:
        """Delete one message and its chunks."""
        message = self._stream(stream).get(seq)
        self._stream(stream).delete(seq)
        if message is not None:
            await blobs.drop_of(self._chunks, message)

    def _stream(self, name: str) -> MemoryStream:
        return self._link.server.stream(name)
