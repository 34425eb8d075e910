"""The transport over NATS JetStream. What it promises stands in `base`; how it keeps it, in the modules it puts together."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shared.transport import blobs, direct, kv, pull
from shared.transport import jetstream_api as api
from shared.transport.base import (
    Conflict,
    ConsumerSpec,
    ConsumerState,
    Delivery,
    KvEntry,
    NotConnected,
    PubAck,
    Retention,
    StoredMessage,
    StreamFull,
    StreamSpec,
    StreamState,
    TooLarge,
    TransportError,
)
from shared.transport.connection import Connection
from shared.transport.counters import Counters
from shared.transport.deadline import Deadline
from shared.transport.reference import BLOB_HEADER, Reference, reference_of

READ_TIMEOUT_S = 5.0
LONGEST_BLOB_S = 120.0
_SLOW_LINE_BYTES_PER_S = 1_000_000
_SERVER_ROOM_BYTES = 16 * 1024
"""Kept free below the server's `max_payload` for headers."""
_BOUNDS_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a publisher must know of a stream: its payload limit (-1: none) and whether acknowledged messages vanish."""

    max_msg_bytes: int
    work_queue: bool
    read_at: float


class NatsTransport:
    """See `base.Transport`. Made by `connect.connect`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bounds: dict[str, _Bounds] = {}
        self._background: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether the server can be reached now."""
        return self._connection.connected

    @property
    def counters(self) -> Counters:
        """Reconnects, errors and the like since the connection was opened."""
        return self._connection.counters

    @property
    def inline_limit_bytes(self) -> int:
        """Payloads above this become blobs."""
        return self._connection.max_payload_bytes - _SERVER_ROOM_BYTES

    async def close(self) -> None:
        """Flush, then disconnect."""
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)
        await self._connection.close()

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create or update the stream and its companion for blobs; sweep chunks that no message refers to."""
        await api.ensure_stream(self._connection, api.stream_config(spec))
        self._bounds.pop(spec.name, None)
        companion = blobs.companion(spec)
        if companion is not None:
            await api.ensure_stream(self._connection, api.stream_config(companion))
            if not spec.deny_purge:
                await self._sweep(spec.name)

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> None:
        """Create or update the durable consumer."""
        await api.ensure_consumer(self._connection, stream, spec)

    async def ensure_bucket(self, bucket: str, *, history: int = 1, ttl_s: float = 0.0, replicas: int = 1) -> None:
        """Create or update the bucket."""
        await api.ensure_stream(self._connection, api.bucket_config(bucket, history, ttl_s, replicas))

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
        deadline = Deadline(timeout_s)
        limit = (await self._bounds_of(stream)).max_msg_bytes
        if 0 <= limit < len(payload):
            raise TooLarge(f"stream {stream} takes payloads up to {limit} bytes, this one has {len(payload)}: not published", limit)
        extra = {**(headers or {}), "Nats-Msg-Id": message_id}
        if expected_last_seq is not None:
            extra["Nats-Expected-Last-Sequence"] = str(expected_last_seq)
        if len(payload) <= self.inline_limit_bytes:
            return await self._store(subject, payload, stream, extra, deadline)
        reference = await blobs.put(
            self, subject, payload, stream=stream, chunk_bytes=self.inline_limit_bytes, timeout_s=deadline.left_s
        )
        try:
            ack = await self._store(subject, b"", stream, {**extra, BLOB_HEADER: reference.header()}, deadline)
        except NotConnected:
            raise
        except TransportError:
            self._later(blobs.drop(self, stream, reference.chunks))
            raise
        if ack.duplicate:
            await self._drop_unless_ours(stream, ack.seq, reference)
        return ack

    async def fetch(self, stream: str, consumer: str, max_messages: int, timeout_s: float) -> list[Delivery]:
        """Up to `max_messages` from a durable consumer."""
        return await pull.fetch(self._connection, stream, consumer, max_messages, timeout_s, self._settled)

    async def payload(self, message: StoredMessage) -> bytes:
        """The payload, assembled and checked if it is a blob."""
        if message.inline is not None:
            return message.inline
        reference = reference_of(message)
        if reference is None:
            raise TransportError(f"message {message.seq} of {message.stream} has neither a payload nor a reference to one")
        timeout_s = min(READ_TIMEOUT_S + reference.size_bytes / _SLOW_LINE_BYTES_PER_S, LONGEST_BLOB_S)
        return await blobs.fetch(self, message, reference, timeout_s=timeout_s)

    async def read(
        self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0, *, max_bytes: int | None = None
    ) -> list[StoredMessage]:
        """Messages at or after `start_seq`, by batched direct get; at most 64 MiB at once."""
        bound = direct.READ_BYTES if max_bytes is None else min(max_bytes, direct.READ_BYTES)
        return await direct.read(self._connection, stream, start_seq, max_messages, Deadline(timeout_s), bound)

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        """The message at exactly `seq`."""
        if seq < 1:
            return None
        return await direct.get(self._connection, stream, {"seq": seq}, Deadline(READ_TIMEOUT_S))

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The newest message on `subject`."""
        return await direct.get(self._connection, stream, {"last_by_subj": subject}, Deadline(READ_TIMEOUT_S))

    async def stream_state(self, stream: str) -> StreamState:
        """Fill of a stream."""
        state = (await self._call(f"STREAM.INFO.{stream}", None, f"stream {stream}"))["state"]
        return StreamState(state["first_seq"], state["last_seq"], state["messages"], state["bytes"])

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """Lag of a consumer."""
        state = await self._call(f"CONSUMER.INFO.{stream}.{consumer}", None, f"consumer {consumer} of stream {stream}")
        return ConsumerState(state["num_pending"], state["num_ack_pending"], state["num_redelivered"])

    async def purge(self, stream: str, up_to_seq: int) -> None:
        """Forget messages up to `up_to_seq`, and chunks that belonged to them."""
        if up_to_seq < 1:
            return
        await self._call(f"STREAM.PURGE.{stream}", {"seq": up_to_seq + 1}, f"purge of stream {stream}")
        if await self._has_companion(stream):
            await self._sweep(stream)

    async def delete(self, stream: str, seq: int) -> None:
        """Forget one message and its chunks."""
        message = await self.get(stream, seq)
        await self.drop(stream, seq)
        if message is not None and message.inline is None:
            await self._drop_chunks(message)

    async def buckets(self) -> Sequence[str]:
        """Names of all key-value buckets, sorted."""
        names: list[str] = []
        while True:
            request = {"subject": "$KV.>", "offset": len(names)}
            answer = await self._call("STREAM.NAMES", request, "names of the buckets")
            page = answer.get("streams") or []
            names += page
            if not page or len(names) >= int(answer["total"]):
                return sorted(name.removeprefix("KV_") for name in names)

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None:
        """The newest value of `key`."""
        return await kv.get(self._connection, bucket, key)

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        """Write, last writer wins."""
        return await self._kv_write(bucket, key, value, {})

    async def kv_update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        """Write if the newest revision is still `last_revision`."""
        return await self._kv_write(bucket, key, value, {"Nats-Expected-Last-Subject-Sequence": str(last_revision)})

    async def kv_all(self, bucket: str, prefix: str = "") -> Sequence[KvEntry]:
        """Newest value of every key that starts with `prefix`."""
        return await kv.get_all(self._connection, bucket, prefix)

    async def kv_newest(self, bucket: str, limit: int) -> tuple[Sequence[KvEntry], int]:
        """The keys written last, and how many others there are."""
        return await kv.newest(self._connection, bucket, limit, await self.stream_state(f"KV_{bucket}"))

    async def kv_watch(self, bucket: str, key: str, *, poll_s: float = 2.0) -> AsyncIterator[KvEntry]:
        """Each new value of `key`, the present one first."""

        async def last_seq() -> int:
            return (await self.stream_state(f"KV_{bucket}")).last_seq

        async for entry in kv.watch(self._connection, bucket, key, poll_s, last_seq):
            yield entry

    async def put_chunk(self, subject: str, chunk: bytes, *, stream: str, timeout_s: float) -> int:
        """Store one chunk of a blob (see `blobs.ChunkStore`). Its id is random: a foreign publisher cannot take it first."""
        headers = {"Nats-Msg-Id": uuid.uuid4().hex}
        return (await self._store(subject, chunk, stream, headers, Deadline(timeout_s))).seq

    async def drop(self, stream: str, seq: int) -> None:
        """Forget one message, leaving its chunks. A message that is not there is no error."""
        try:
            await self._call(f"STREAM.MSG.DELETE.{stream}", {"seq": seq}, f"delete of {seq} in stream {stream}")
        except api.ApiError as error:
            if error.err_code not in api.NO_MESSAGE_FOUND:
                raise

    async def _store(self, subject: str, payload: bytes, stream: str, headers: dict[str, str], deadline: Deadline) -> PubAck:
        headers["Nats-Expected-Stream"] = stream
        what = f"publish on {subject} to stream {stream}"
        while True:
            try:
                reply = await self._connection.request(subject, payload, deadline, headers=headers, what=what)
            except NotConnected as unanswered:
                if not self.connected:
                    raise
                hint = "if this goes on, see the server's log: where the disk is full it answers nothing until it is restarted"
                raise NotConnected(f"{unanswered}: {hint}") from None
            answer: dict[str, Any] = json.loads(reply.data)
            if "error" not in answer:
                return PubAck(int(answer["seq"]), bool(answer.get("duplicate", False)))
            error = api.ApiError(what, answer["error"])
            if error.err_code in api.WRONG_LAST_SEQUENCE:
                return await self._ours_or_conflict(stream, subject, headers, error)
            if error.err_code == api.STORE_FAILED and "exceeded" in error.description:
                raise StreamFull(f"{what}: {error.description}: the reader is behind, publish again later")
            if error.err_code == api.MESSAGE_TOO_LARGE:
                raise TooLarge(f"{what}: {error.description}: {len(payload)} bytes")
            if not error.passing:
                raise error
            if deadline.left_s < 0.2:
                raise NotConnected(str(error))
            await asyncio.sleep(0.1)

    async def _ours_or_conflict(self, stream: str, subject: str, headers: Mapping[str, str], error: api.ApiError) -> PubAck:
        """The server compares sequences before it looks for duplicates: an earlier attempt may be what we lost against."""
        message_id, conflict = headers["Nats-Msg-Id"], Conflict(f"{error}: read the newest state and decide again")
        expected = headers.get("Nats-Expected-Last-Sequence")
        stored = await (self.last(stream, subject) if expected is None else self.get(stream, int(expected) + 1))
        if stored is not None and stored.headers.get("Nats-Msg-Id") == message_id:
            return PubAck(stored.seq, True)
        raise conflict

    async def _kv_write(self, bucket: str, key: str, value: bytes, headers: dict[str, str]) -> int:
        if len(value) > self.inline_limit_bytes:
            raise TooLarge(f"bucket {bucket}: values up to {self.inline_limit_bytes} bytes, {key} has {len(value)}: use a stream")
        headers["Nats-Msg-Id"] = uuid.uuid4().hex
        # A leaf server keeps plain `$KV.` subjects to itself: into another domain they go by way of its API.
        options = self._connection.options
        subject = f"{options.api_prefix}.{kv.subject(bucket, key)}" if options.domain else kv.subject(bucket, key)
        ack = await self._store(subject, value, f"KV_{bucket}", headers, Deadline(kv.KV_TIMEOUT_S))
        return ack.seq

    async def _call(self, subject: str, request: Mapping[str, Any] | None, what: str) -> Any:
        return await api.call(self._connection, subject, request, Deadline(READ_TIMEOUT_S), what)

    async def _bounds_of(self, stream: str) -> _Bounds:
        known = self._bounds.get(stream)
        now = time.monotonic()
        if known is not None and now - known.read_at < _BOUNDS_AGE_S:
            return known
        try:
            answer = await api.call(self._connection, f"STREAM.INFO.{stream}", None, Deadline(1.0), f"stream {stream}")
        except TransportError:
            # Not allowed to ask, or nobody there: the server itself decides about the message that follows.
            if known is not None or not self.connected:
                return known or _Bounds(-1, False, now)
            bounds = _Bounds(-1, False, now)
        else:
            size = int(answer["config"].get("max_msg_size", -1))
            work_queue = answer["config"]["retention"] == Retention.WORK_QUEUE.value
            bounds = _Bounds(size - blobs.HEADER_ROOM_BYTES if size >= blobs.HEADER_ROOM_BYTES else size, work_queue, now)
        self._bounds[stream] = bounds
        return bounds

    async def _has_companion(self, stream: str) -> bool:
        try:
            await self._call(f"STREAM.INFO.{blobs.companion_name(stream)}", None, f"stream {blobs.companion_name(stream)}")
        except api.ApiError:
            return False
        return True

    async def _sweep(self, stream: str) -> None:
        """Purge chunks that are older than any message that could refer to them."""
        oldest = await self.read(stream, 1, 1)
        before = datetime.fromtimestamp(blobs.sweep_before(oldest[0].stored_at if oldest else None, time.time()), UTC)
        name = blobs.companion_name(stream)
        request = {"start_time": before.isoformat(), "batch": 1}
        kept = await direct.batch(self._connection, name, request, Deadline(READ_TIMEOUT_S))
        first_kept = kept.messages[0].seq if kept.messages else (await self.stream_state(name)).last_seq + 1
        if first_kept > 1:
            await self._call(f"STREAM.PURGE.{name}", {"seq": first_kept}, f"purge of stream {name}")

    async def _drop_unless_ours(self, stream: str, seq: int, reference: Reference) -> None:
        """Of a message that was there already, the chunks stored again are dropped."""
        stored = await self.get(stream, seq)
        if stored is None or stored.headers.get(BLOB_HEADER) != reference.header():
            self._later(blobs.drop(self, stream, reference.chunks))

    def _settled(self, message: StoredMessage) -> None:
        if message.inline is None:
            self._later(self._drop_settled(message))

    async def _drop_settled(self, message: StoredMessage) -> None:
        if (await self._bounds_of(message.stream)).work_queue:
            await self._drop_chunks(message)

    async def _drop_chunks(self, message: StoredMessage) -> None:
        with suppress(TransportError):
            reference = reference_of(message)
            await blobs.drop(self, message.stream, reference.chunks if reference else ())

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
