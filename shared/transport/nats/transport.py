"""The transport over NATS JetStream. `base` documents its contract; the modules that it combines
implement it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

from shared.transport import blobs
from shared.transport.base import (
    AccessDenied,
    ConsumerSpec,
    ConsumerState,
    Counters,
    Deadline,
    Ends,
    Fence,
    KeyValue,
    Lowering,
    NotConnected,
    PubAck,
    StoredMessage,
    StreamSpec,
    StreamState,
    TooLarge,
    Transport,
    TransportError,
)
from shared.transport.blobs import BLOB_HEADER, Reference
from shared.transport.nats import direct
from shared.transport.nats import jetstream_api as api
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import NatsChunks, StreamBounds
from shared.transport.nats.key_value import NatsKeyValue


class NatsTransport:
    """See `base.Transport`. Made by `connect.connect`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._bounds = StreamBounds(connection)
        self.chunks = NatsChunks(connection, self._bounds)
        self._fence: Fence | None = None
        self._kv = NatsKeyValue(connection)

    @property
    def connected(self) -> bool:
        return self.connection.connected

    @property
    def certificate_expires_at(self) -> float | None:
        client = self.connection.client
        return None if client is None else client.certificate_expires_at

    @property
    def counters(self) -> Counters:
        return self.connection.counters

    @property
    def kv(self) -> KeyValue:
        return self._kv

    def fenced(self, fence: Fence) -> NatsTransport:
        same = copy(self)
        same._fence, same._kv = fence, NatsKeyValue(self.connection, fence)
        return same

    async def close(self) -> None:
        await self.chunks.close()
        await self.connection.close()

    async def ensure_stream(self, spec: StreamSpec, lowering: Lowering = Lowering.APPLY) -> None:
        """Create or update the stream and its companion for blobs, and delete chunks that no
        message refers to.
        """
        await self.writable()
        await api.ensure_stream(self.connection, api.stream_config(spec), lowering)
        self._bounds.forget(spec.name)
        companion = blobs.companion(spec)
        if companion is not None:
            await api.ensure_stream(self.connection, api.stream_config(companion), lowering)
            if not spec.deny_purge and lowering is not Lowering.LOOK:
                await self.chunks.sweep(spec.name)

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> None:
        await self.writable()
        await api.ensure_consumer(self.connection, stream, spec)

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
        await self.writable()
        deadline = Deadline(timeout_s)
        limit = (await self._bounds.of(stream)).max_msg_bytes
        if 0 <= limit < len(payload):
            raise TooLarge(
                f"stream {stream} accepts payloads up to {limit} bytes, this one has {len(payload)}: not published", limit
            )
        extra = {**(headers or {}), "Nats-Msg-Id": message_id}
        if expected_last_seq is not None:
            extra["Nats-Expected-Last-Sequence"] = str(expected_last_seq)
        inline_limit = self.connection.inline_limit_bytes
        if len(payload) <= inline_limit:
            return await api.store(self.connection, subject, payload, stream, extra, deadline)
        reference = await blobs.put(
            self.chunks, subject, payload, stream=stream, chunk_bytes=inline_limit, timeout_s=deadline.left_s
        )
        extra[BLOB_HEADER] = reference.header()
        try:
            ack = await api.store(self.connection, subject, b"", stream, extra, deadline)
        except NotConnected:
            raise  # the message may have been stored, so its chunks stay
        except TransportError:
            self.chunks.drop_later(stream, reference.chunks)
            raise
        if ack.duplicate:
            await _drop_unless_ours(self, self.chunks, stream, ack.seq, reference)
        return ack

    async def payload(self, message: StoredMessage) -> bytes:
        return await blobs.payload(self.chunks, message)

    async def read(self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0) -> list[StoredMessage]:
        """Messages at or after `start_seq`, by batched direct get; at most 64 MiB per call."""
        return await direct.read(self.connection, stream, start_seq, max_messages, Deadline(timeout_s))

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        if seq < 1:
            return None
        return await direct.get(self.connection, stream, {"seq": seq}, Deadline(api.READ_TIMEOUT_S))

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        return await direct.get(self.connection, stream, {"last_by_subj": subject}, Deadline(api.READ_TIMEOUT_S))

    async def next(self, stream: str, subject: str, start_seq: int) -> StoredMessage | None:
        return await direct.get(self.connection, stream, {"seq": start_seq, "next_by_subj": subject}, Deadline(api.READ_TIMEOUT_S))

    async def ends(self, stream: str, start_seq: int = 1, timeout_s: float = 5.0, *, newest: bool = True) -> Ends:
        return await direct.ends(self.connection, stream, start_seq, Deadline(timeout_s), newest=newest)

    async def stream_state(self, stream: str) -> StreamState:
        _check_may_ask(self.connection, stream)
        return await api.stream_state(self.connection, stream)

    async def counts(self, stream: str, subject: str) -> Mapping[str, int]:
        _check_may_ask(self.connection, stream)
        return await api.counts(self.connection, stream, subject)

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        return await api.consumer_state(self.connection, stream, consumer)

    async def purge(self, stream: str, up_to_seq: int) -> None:
        """Delete messages up to `up_to_seq`, and their chunks."""
        await self.writable()
        if up_to_seq < 1:
            return
        await api.purge(self.connection, stream, up_to_seq + 1)
        await self.chunks.sweep_if_any(stream)

    async def writable(self) -> None:
        """Ask the fence, if there is one. Raises NotConnected."""
        if self._fence is not None:
            await self._fence.writable()


async def _drop_unless_ours(transport: NatsTransport, chunks: NatsChunks, stream: str, seq: int, reference: Reference) -> None:
    """If the message was already stored, delete the chunks that were stored again."""
    stored = await transport.get(stream, seq)
    if stored is None or stored.headers.get(BLOB_HEADER) != reference.header():
        chunks.drop_later(stream, reference.chunks)


def _check_may_ask(connection: Connection, stream: str) -> None:
    """A request without permission gets no answer, and the server logs it."""
    if not connection.options.may_ask:
        raise AccessDenied(f"stream {stream} at {connection.options.url}: only an operator may ask about it there")


def connection_of(transport: Transport) -> Connection:
    """The connection below, for what an operator does with whole streams."""
    assert isinstance(transport, NatsTransport)
    return transport.connection
