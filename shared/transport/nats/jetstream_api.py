"""JetStream's JSON API: requests, typed errors, creating and updating streams and consumers,
reading their state, and storing a message or the chunks of a large one.

Sources: https://docs.nats.io/reference/reference-protocols/nats_api_reference, and the server's
`errors.json` for the error codes. Since 2.12 the server refuses unknown fields, so requests contain
only fields that the server returned or that are known to exist.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from shared.transport import blobs
from shared.transport.base import (
    Conflict,
    ConsumerSpec,
    ConsumerState,
    Deadline,
    Lowering,
    NotConnected,
    PubAck,
    Retention,
    StoredMessage,
    StreamFull,
    StreamMissing,
    StreamSpec,
    StreamState,
    TooLarge,
    TransportError,
    WouldLower,
    bucket_of_stream,
    bucket_stream,
    lowered,
)
from shared.transport.blobs import HEADER_ROOM_BYTES
from shared.transport.nats import direct
from shared.transport.nats.answers import answer_object, count_of, quote_server, readable
from shared.transport.nats.connection import Connection

log = structlog.get_logger(__name__)

SETUP_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 5.0
NANOSECONDS = 1_000_000_000
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 0.5
"""Between two requests of the same: a server without a leader refuses at once, and would be asked
thousands of times a second by each node while it has the least to spare.
"""

STREAM_NAME_IN_USE = 10058
STREAM_NOT_FOUND = 10059
MESSAGE_TOO_LARGE = 10054
STORE_FAILED = 10077
WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
NO_MESSAGE_FOUND = frozenset({10037, 10043, 10057})
SUBJECTS_OVERLAP = 10065
PROTECTIONS = ("num_replicas", "max_msgs", "max_bytes", "max_age", "max_msgs_per_subject", "max_msg_size")
"""Settings that, when lowered, delete messages or copies of them."""
_BUCKET_LIMITS = ("max_msgs", "max_bytes", "max_msg_size")
SECONDS = {"max_age": "max_age_s"}
"""Settings that the server has in nanoseconds, with their names in seconds."""
_KEY_HEADERS_BYTES = 1024
"""More than the headers of one of our writes need."""


class ApiError(TransportError):
    """The server refused a request. `err_code` is JetStream's own number for the reason."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        self.code = int(error.get("code", 0))
        self.err_code = int(error.get("err_code", 0))
        self.description = quote_server(error.get("description", ""))
        super().__init__(f"{what}: {self.description} (JetStream error {self.err_code})")

    @property
    def passing(self) -> bool:
        """Check whether the same request may succeed later, because the server is starting,
        electing a leader or overloaded.
        """
        return self.code in (429, 503)


async def call(
    connection: Connection, subject: str, request: Mapping[str, Any] | None, deadline: Deadline, what: str
) -> dict[str, Any]:
    """Make one request of the JSON API; the answer is an object of which nothing else is known.

    Raises:
        ApiError: the server refuses.
        NotConnected: nobody answers before the deadline.
        TransportError: the answer cannot be read.
    """
    body = b"" if request is None else json.dumps(request).encode()
    wait_s = _FIRST_WAIT_S
    while True:
        reply = await connection.request(f"{connection.options.api_prefix}.{subject}", body, deadline, what=what)
        try:
            return answered(reply.data, what)
        except ApiError as error:
            if not error.passing or deadline.left_s < wait_s + 0.4:
                raise
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def answered(text: bytes, what: str) -> dict[str, Any]:
    """The object in an answer of the JSON API. Raises as `call`, of which it is a part."""
    answer = answer_object(text, what)
    if "error" not in answer:
        return answer
    with readable(what):
        error = ApiError(what, answer["error"])
    raise error


def stream_config(spec: StreamSpec) -> dict[str, Any]:
    """`spec` in the server's format. Direct reads are always allowed, rollups never, because a
    rollup could delete a whole stream.
    """
    return {
        "name": spec.name,
        "description": spec.description,
        "subjects": list(spec.subjects),
        "retention": spec.retention.value,
        "storage": "file",
        "discard": "new" if spec.discard_new else "old",
        "max_age": round(spec.max_age_s * NANOSECONDS),
        "max_bytes": spec.max_bytes,
        "max_msgs": spec.max_msgs,
        "max_msg_size": spec.max_msg_bytes + HEADER_ROOM_BYTES if spec.max_msg_bytes >= 0 else -1,
        "duplicate_window": _window(spec.duplicate_window_s, spec.max_age_s),
        "num_replicas": spec.replicas,
        "allow_direct": True,
        "allow_rollup_hdrs": False,
        "deny_delete": spec.deny_delete or spec.write_once,
        "deny_purge": spec.deny_purge or spec.write_once,
        **({"max_msgs_per_subject": spec.max_msgs_per_subject} if spec.max_msgs_per_subject > 0 else {}),
        **({"max_msgs_per_subject": 1, "discard_new_per_subject": True} if spec.write_once else {}),
    }


def bucket_config(
    bucket: str,
    history: int,
    ttl_s: float,
    replicas: int,
    max_value_bytes: int,
    max_bytes: int,
    max_values: int,
    duplicate_window_s: float,
) -> dict[str, Any]:
    """A key-value bucket as a stream (ADR-8), without rollups, because nobody needs to purge a key
    here. A message's size includes its headers.
    """
    return {
        "name": bucket_stream(bucket),
        "subjects": [f"$KV.{bucket}.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_age": round(ttl_s * NANOSECONDS),
        "max_msgs_per_subject": history,
        "max_bytes": max_bytes or -1,
        "max_msgs": max_values or -1,
        "max_msg_size": max_value_bytes + _KEY_HEADERS_BYTES if max_value_bytes else -1,
        "duplicate_window": _window(duplicate_window_s, ttl_s),
        "num_replicas": replicas,
        "allow_direct": True,
        "allow_rollup_hdrs": False,
        "deny_delete": True,
        "deny_purge": False,
    }


def _window(wanted_s: float, max_age_s: float) -> int:
    """A duplicate window in nanoseconds. A server accepts none that exceeds the age limit."""
    return round((min(wanted_s, max_age_s) if max_age_s > 0 else wanted_s) * NANOSECONDS)


def drift(wanted: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Names of the settings in which a stream differs from what is wanted. The server omits empty
    values.
    """

    def differs(key: str) -> bool:
        is_now = actual.get(key)
        if key == "subjects":
            return sorted(wanted[key]) != sorted(is_now or [])
        return bool(wanted[key]) if is_now is None else bool(wanted[key] != is_now)

    return [key for key in wanted if differs(key)]


def _in_seconds(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stream's settings, with durations in seconds for people to read."""
    return {**config, **{shown: config[key] / NANOSECONDS for key, shown in SECONDS.items() if config.get(key)}}


def _would_lower(wanted: Mapping[str, Any], actual: Mapping[str, Any], higher: Sequence[str]) -> WouldLower:
    return WouldLower(wanted["name"], _in_seconds(wanted), _in_seconds(actual), [SECONDS.get(key, key) for key in higher])


async def _config(connection: Connection, name: str, deadline: Deadline) -> dict[str, Any]:
    what = f"stream {name}"
    answer = await call(connection, f"STREAM.INFO.{name}", None, deadline, what)
    with readable(what):
        return dict(answer["config"])


async def _look(connection: Connection, wanted: Mapping[str, Any], deadline: Deadline) -> None:
    """Raises WouldLower if an update would lower a protection; changes nothing."""
    name = wanted["name"]
    try:
        actual = await _config(connection, name, deadline)
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return
        raise
    with readable(f"stream {name}"):
        higher = _lowered(wanted, actual)
    if higher:
        raise _would_lower(wanted, actual, higher)


def _lowered(wanted: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """The protections that an update would lower. A first limit on a bucket lowers none: where new
    messages are refused, nothing is deleted for it.
    """
    higher = lowered(wanted, actual, PROTECTIONS)
    if bucket_of_stream(wanted["name"]) == wanted["name"] or actual.get("discard") != "new":
        return higher
    return [key for key in higher if key not in _BUCKET_LIMITS or int(actual.get(key) or 0) > 0]


async def ensure_stream(connection: Connection, wanted: Mapping[str, Any], lowering: Lowering = Lowering.APPLY) -> None:
    """Create the stream, or update the settings that differ. Settings that `wanted` does not name
    stay as an operator left them.

    Raises:
        WouldLower: the update would lower a protection and `lowering` refuses that.
    """
    name, deadline = wanted["name"], Deadline(SETUP_TIMEOUT_S)
    what = f"stream {name}"
    if lowering is Lowering.LOOK:
        await _look(connection, wanted, deadline)
        return
    try:
        await call(connection, f"STREAM.CREATE.{name}", wanted, deadline, what)
        return
    except ApiError as error:
        if error.err_code == SUBJECTS_OVERLAP:
            raise TransportError(
                f"{what}: another stream has (some of) the subjects {', '.join(wanted['subjects'])}: list streams with `nats "
                "stream ls` "
                "and remove the conflicting one"
            ) from None
        if error.err_code != STREAM_NAME_IN_USE:
            raise
    actual = await _config(connection, name, deadline)
    with readable(what):
        higher = [] if lowering is Lowering.APPLY else _lowered(wanted, actual)
    if higher and lowering is Lowering.REFUSE:
        raise _would_lower(wanted, actual, higher)
    if higher:
        kept = {key: actual.get(key) for key in higher}
        log.warning("stream_not_lowered", stream=name, kept=kept, wanted={key: wanted[key] for key in higher})
        wanted = {key: value for key, value in wanted.items() if key not in higher}
    with readable(what):
        changed, merged = drift(wanted, actual), {**actual, **wanted}
        merged["metadata"] = {k: v for k, v in actual.get("metadata", {}).items() if not k.startswith("_nats.")}
    if not changed:
        return
    try:
        await call(connection, f"STREAM.UPDATE.{name}", merged, deadline, what)
    except ApiError as error:
        raise TransportError(
            f"{what} exists with another {', '.join(changed)} and the server cannot change that ({error.description}): "
            f"drain it and remove it with `nats stream rm {name}` (its messages are lost), then start again"
        ) from None
    log.info("stream_updated", stream=name, changed=changed)


async def ensure_consumer(connection: Connection, stream: str, spec: ConsumerSpec) -> None:
    """Create or update the durable pull consumer."""
    config: dict[str, Any] = {
        "name": spec.name,
        "durable_name": spec.name,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_wait": round(spec.ack_wait_s * NANOSECONDS),
        "max_deliver": spec.max_deliver,
        "max_ack_pending": spec.max_ack_pending,
    }
    subject = f"CONSUMER.CREATE.{stream}.{spec.name}"
    what = f"consumer {spec.name} of stream {stream}"
    try:
        await call(connection, subject, {"stream_name": stream, "config": config}, Deadline(SETUP_TIMEOUT_S), what)
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            raise NotConnected(f"{what}: the stream does not exist: call ensure_stream first") from None
        raise TransportError(
            f"{what}: {error.description}: if it exists with settings that cannot be changed, remove it with "
            f"`nats consumer rm {stream} {spec.name}` (unacknowledged messages are delivered again)"
        ) from None


async def stream_state(connection: Connection, stream: str) -> StreamState:
    """State of a stream. Raises StreamMissing if the server has none of this name."""
    what = f"stream {stream}"
    try:
        answer = await call(connection, f"STREAM.INFO.{stream}", None, Deadline(READ_TIMEOUT_S), what)
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            raise StreamMissing(str(error)) from None
        raise
    with readable(what):
        first, last, messages, size = (count_of(answer["state"][name]) for name in ("first_seq", "last_seq", "messages", "bytes"))
        return StreamState(first, last, messages, size, _unix_time(answer.get("ts")), str(answer.get("created", "")))


async def counts(connection: Connection, stream: str, subject: str) -> Mapping[str, int]:
    """Messages of a stream by matching subject: the first page of the server's list."""
    request, what = {"subjects_filter": subject}, f"subjects of stream {stream}"
    answer = await call(connection, f"STREAM.INFO.{stream}", request, Deadline(READ_TIMEOUT_S), what)
    with readable(what):
        return {name: count_of(count) for name, count in (answer["state"].get("subjects") or {}).items()}


def _unix_time(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None


async def consumer_state(connection: Connection, stream: str, consumer: str) -> ConsumerState:
    """Lag of a consumer."""
    subject, what = f"CONSUMER.INFO.{stream}.{consumer}", f"consumer {consumer} of stream {stream}"
    state = await call(connection, subject, None, Deadline(READ_TIMEOUT_S), what)
    with readable(what):
        return ConsumerState(*(count_of(state[name]) for name in ("num_pending", "num_ack_pending", "num_redelivered")))


async def purge(connection: Connection, stream: str, first_kept: int) -> None:
    """Delete the messages before sequence `first_kept`."""
    await call(connection, f"STREAM.PURGE.{stream}", {"seq": first_kept}, Deadline(READ_TIMEOUT_S), f"purge of stream {stream}")


async def delete_message(connection: Connection, stream: str, seq: int) -> None:
    """Delete one message. A missing one is not an error."""
    subject, what = f"STREAM.MSG.DELETE.{stream}", f"delete of {seq} in stream {stream}"
    try:
        await call(connection, subject, {"seq": seq}, Deadline(READ_TIMEOUT_S), what)
    except ApiError as error:
        if error.err_code not in NO_MESSAGE_FOUND or "not permitted" in error.description:
            raise


async def store(
    connection: Connection, subject: str, payload: bytes, stream: str, headers: Mapping[str, str], deadline: Deadline
) -> PubAck:
    """Store a message that fits the server. `headers` contain its `Nats-Msg-Id`, by which the
    server recognises a second attempt.

    Raises:
        Conflict: the sequence that the headers expect is not the last, or the subject takes one
            message and has it.
        StreamFull: a `discard_new` stream is at its limit.
        TooLarge: the server refuses the size.
        NotConnected: no acknowledgement before the deadline.
        TransportError: the answer cannot be read.
    """
    told, started = {**headers, "Nats-Expected-Stream": stream}, time.perf_counter()
    what = f"publish on {subject} to stream {stream}"
    while True:
        try:
            reply = await connection.request(subject, payload, deadline, headers=told, what=what)
        except NotConnected as unanswered:
            if not connection.connected:
                raise
            hint = "if this persists, see the server's log: with a full disk it stops answering until it is restarted"
            raise NotConnected(f"{unanswered}: {hint}") from None
        answer = answer_object(reply.data, what)
        with readable(what):
            if "error" not in answer:
                connection.counters.stores.add(time.perf_counter() - started)
                return PubAck(count_of(answer["seq"]), bool(answer.get("duplicate", False)))
            error = ApiError(what, answer["error"])
        if error.err_code in WRONG_LAST_SEQUENCE:
            return await _ours_or_conflict(connection, stream, subject, told, error)
        if error.err_code == STORE_FAILED and "per subject exceeded" in error.description:
            raise Conflict(f"{what}: the subject takes one message, and has it")
        if error.err_code == STORE_FAILED and "exceeded" in error.description:
            raise StreamFull(f"{what}: {error.description}: the reader is behind, publish again later")
        if error.err_code == MESSAGE_TOO_LARGE:
            raise TooLarge(f"{what}: {error.description}: {len(payload)} bytes")
        if not error.passing:
            raise error
        if deadline.left_s < 0.2:
            raise NotConnected(str(error))
        await asyncio.sleep(0.1)


async def _ours_or_conflict(
    connection: Connection, stream: str, subject: str, headers: Mapping[str, str], error: ApiError
) -> PubAck:
    """The server compares sequences before it looks for duplicates, so an earlier attempt of this
    call may have caused the conflict.
    """
    expected = headers.get("Nats-Expected-Last-Sequence")
    request = {"last_by_subj": subject} if expected is None else {"seq": int(expected) + 1}
    stored = await direct.get(connection, stream, request, Deadline(READ_TIMEOUT_S))
    if stored is not None and stored.headers.get("Nats-Msg-Id") == headers["Nats-Msg-Id"]:
        return PubAck(stored.seq, True)
    raise Conflict(f"{error}: read the newest state and decide again")


_BOUNDS_VALID_S = 60.0


@dataclass(frozen=True, slots=True)
class PublishBounds:
    """Largest payload that a stream accepts (-1: any), and whether messages are deleted once they
    are acknowledged.
    """

    max_msg_bytes: int
    work_queue: bool
    read_at: float


class StreamBounds:
    """The limits of the streams that this process publishes to."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[str, PublishBounds] = {}

    def forget(self, stream: str) -> None:
        self._known.pop(stream, None)

    async def of(self, stream: str) -> PublishBounds:
        """The stream's limits. No limits if the server does not report them, or this user may not
        ask for them; the server then decides about the message itself.
        """
        if not self._connection.options.may_ask:
            return PublishBounds(-1, False, 0.0)
        known = self._known.get(stream)
        now = time.monotonic()
        if known is not None and now - known.read_at < _BOUNDS_VALID_S:
            return known
        what = f"stream {stream}"
        try:
            answer = await call(self._connection, f"STREAM.INFO.{stream}", None, Deadline(1.0), what)
            with readable(what):
                size = int(answer["config"].get("max_msg_size", -1))
                work_queue = answer["config"]["retention"] == Retention.WORK_QUEUE.value
        except TransportError:
            if known is not None or not self._connection.connected:
                return known or PublishBounds(-1, False, now)
            bounds = PublishBounds(-1, False, now)
        else:
            bounds = PublishBounds(size - blobs.HEADER_ROOM_BYTES if size >= blobs.HEADER_ROOM_BYTES else size, work_queue, now)
        self._known[stream] = bounds
        return bounds


class NatsChunks:
    """The chunks of a server's streams (see `blobs.ChunkStore`). Deletions run in background
    tasks.
    """

    def __init__(self, connection: Connection, bounds: StreamBounds) -> None:
        self._connection = connection
        self._bounds = bounds
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for the background tasks, at most 2 seconds."""
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)

    async def put_chunk(self, subject: str, chunk: bytes, *, stream: str, timeout_s: float) -> int:
        """Store one chunk. Its message id is random, so that a foreign publisher cannot use it
        first.
        """
        headers = {"Nats-Msg-Id": uuid.uuid4().hex}
        return (await store(self._connection, subject, chunk, stream, headers, Deadline(timeout_s))).seq

    async def read(
        self, stream: str, start_seq: int, max_messages: int, timeout_s: float, *, max_bytes: int
    ) -> list[StoredMessage]:
        bound = min(max_bytes, direct.READ_BYTES)
        return await direct.read(self._connection, stream, start_seq, max_messages, Deadline(timeout_s), bound)

    async def drop(self, stream: str, seq: int) -> None:
        """Delete one chunk. A missing one is not an error."""
        await delete_message(self._connection, stream, seq)

    def drop_later(self, stream: str, chunks: Sequence[int]) -> None:
        self._later(blobs.drop(self, stream, chunks))

    def settled(self, message: StoredMessage) -> None:
        """A reader has finished with the message. In a work queue this deletes it, so its chunks
        are deleted too, in the background.
        """
        if message.inline is None:
            self._later(self._drop_settled(message))

    async def sweep(self, stream: str) -> None:
        """Purge chunks that are older than any message of `stream` that could refer to them."""
        oldest = await direct.read(self._connection, stream, 1, 1, Deadline(READ_TIMEOUT_S))
        before = datetime.fromtimestamp(blobs.sweep_before(oldest[0].stored_at if oldest else None, time.time()), UTC)
        name = blobs.companion_name(stream)
        request = {"start_time": before.isoformat(), "batch": 1}
        kept = await direct.batch(self._connection, name, request, Deadline(READ_TIMEOUT_S))
        first_kept = kept.messages[0].seq if kept.messages else (await stream_state(self._connection, name)).last_seq + 1
        if first_kept > 1:
            await purge(self._connection, name, first_kept)

    async def sweep_if_any(self, stream: str) -> None:
        """`sweep` where the stream has a companion."""
        try:
            await stream_state(self._connection, blobs.companion_name(stream))
        except (ApiError, StreamMissing):
            return
        await self.sweep(stream)

    async def _drop_settled(self, message: StoredMessage) -> None:
        if (await self._bounds.of(message.stream)).work_queue:
            await blobs.drop_of(self, message)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
