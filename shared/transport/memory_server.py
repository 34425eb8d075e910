"""JetStream's rules as plain state, for `memory`: what is stored, refused, handed out and forgotten. No I/O.

Time is an argument of the constructor, so that a test can move it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from shared.transport.base import (
    Conflict,
    ConsumerSpec,
    ConsumerState,
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
from shared.transport.reference import BLOB_HEADER, size_of


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject falls under a pattern with `*` (one token) and `>` (one or more at the end)."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > position
        if position >= len(tokens) or token not in ("*", tokens[position]):
            return False
    return len(wanted) == len(tokens)


@dataclass(slots=True)
class _Pending:
    """A message handed out: when it is handed out again, and how often it was."""

    due_at: float
    deliveries: int


@dataclass(slots=True)
class _Consumer:
    spec: ConsumerSpec
    next_seq: int = 1
    pending: dict[int, _Pending] = field(default_factory=dict)


class MemoryStream:
    """One stream and its consumers."""

    def __init__(self, spec: StreamSpec, now: Callable[[], float]) -> None:
        self.spec = spec
        self._now = now
        self._messages: dict[int, StoredMessage] = {}
        self._sizes: dict[int, int] = {}
        self._last_seq = 0
        self._ids: dict[str, tuple[int, float]] = {}
        self.consumers: dict[str, _Consumer] = {}

    def update(self, spec: StreamSpec) -> None:
        """Take other settings, where the server would."""
        if (spec.retention is Retention.WORK_QUEUE) != (self.spec.retention is Retention.WORK_QUEUE):
            raise TransportError(
                f"stream {spec.name} exists with another retention and the server cannot change that: "
                f"drain it and remove it with `nats stream rm {spec.name}` (its messages are lost), then start again"
            )
        self.spec = spec
        for subject in {message.subject for message in self._messages.values()}:
            self._make_room_under(subject)
        self._make_room()

    def check(self, subject: str, size_bytes: int) -> None:
        """Refuse a payload before anything of it is stored."""
        if not any(matches(pattern, subject) for pattern in self.spec.subjects):
            raise NotConnected(f"publish on {subject}: stream {self.spec.name} does not take that subject")
        if 0 <= self.spec.max_msg_bytes < size_bytes:
            raise TooLarge(
                f"stream {self.spec.name} takes payloads up to {self.spec.max_msg_bytes} bytes, "
                f"this one has {size_bytes}: not published",
                self.spec.max_msg_bytes,
            )

    def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create or update a consumer."""
        self.consumers.setdefault(spec.name, _Consumer(spec)).spec = spec

    def store(self, subject: str, body: bytes, headers: Mapping[str, str], expected_last_seq: int | None) -> PubAck:
        """What the server does with a publish, in its order: sequence, duplicate, room."""
        spec, now, message_id = self.spec, self._now(), headers["Nats-Msg-Id"]
        self._expire()
        if expected_last_seq is not None and expected_last_seq != self._last_seq:
            stored = self._messages.get(expected_last_seq + 1)
            if stored is not None and stored.headers.get("Nats-Msg-Id") == message_id:
                return PubAck(stored.seq, True)
            raise Conflict(f"stream {spec.name}: wrong last sequence: {self._last_seq}: read the newest state and decide again")
        self._ids = {known: (seq, at) for known, (seq, at) in self._ids.items() if now - at < spec.duplicate_window_s}
        if message_id in self._ids:
            return PubAck(self._ids[message_id][0], True)
        kept_bytes = len(body) + sum(len(key) + len(value) for key, value in headers.items())
        if spec.discard_new and self._is_over(len(self._messages) + 1, sum(self._sizes.values()) + kept_bytes):
            raise StreamFull(f"stream {spec.name}: maximum messages or bytes exceeded: the reader is behind, publish again later")
        self._last_seq += 1
        seq = self._last_seq
        inline = None if BLOB_HEADER in headers else body
        self._messages[seq] = StoredMessage(spec.name, seq, subject, size_of(headers, body), now, inline, dict(headers))
        self._sizes[seq] = kept_bytes
        self._ids[message_id] = (seq, now)
        self._make_room_under(subject)
        self._make_room()
        return PubAck(seq, False)

    def read(self, start_seq: int, max_messages: int, max_bytes: int | None = None) -> list[StoredMessage]:
        """Messages at or after `start_seq`, up to the one by which `max_bytes` are reached."""
        self._expire()
        found: list[StoredMessage] = []
        held_bytes = 0
        for message in self._messages.values():
            if len(found) == max_messages or (max_bytes is not None and held_bytes >= max_bytes and found):
                break
            if message.seq >= start_seq:
                found.append(message)
                held_bytes += self._sizes[message.seq]
        return found

    def get(self, seq: int) -> StoredMessage | None:
        """The message at `seq`."""
        self._expire()
        return self._messages.get(seq)

    def last(self, subject: str) -> StoredMessage | None:
        """The newest message on `subject`."""
        self._expire()
        return next((m for m in reversed(self._messages.values()) if matches(subject, m.subject)), None)

    def state(self) -> StreamState:
        """Fill."""
        self._expire()
        first = next(iter(self._messages), self._last_seq + 1 if self._last_seq else 0)
        return StreamState(first, self._last_seq, len(self._messages), sum(self._sizes.values()))

    def purge(self, up_to_seq: int) -> None:
        """Forget messages up to `up_to_seq`."""
        if self.spec.deny_purge:
            raise TransportError(f"stream {self.spec.name} denies purges")
        for seq in [seq for seq in self._messages if seq <= up_to_seq]:
            self._forget(seq)

    def delete(self, seq: int) -> None:
        """Forget one message."""
        if self.spec.deny_delete:
            raise TransportError(f"stream {self.spec.name} denies deletes")
        self._forget(seq)

    def hand_out(self, consumer: str, max_messages: int) -> list[tuple[StoredMessage, int]]:
        """Next messages of a consumer with their delivery counts: those due again first, then new ones."""
        self._expire()
        state, now = self.consumer(consumer), self._now()
        handed: list[tuple[StoredMessage, int]] = []
        for seq, pending in sorted(state.pending.items()):
            if pending.due_at > now or len(handed) >= max_messages:
                continue
            if 0 < state.spec.max_deliver <= pending.deliveries or seq not in self._messages:
                del state.pending[seq]
                continue
            pending.deliveries += 1
            pending.due_at = now + state.spec.ack_wait_s
            handed.append((self._messages[seq], pending.deliveries))
        for seq, message in self._messages.items():
            if len(handed) >= max_messages or 0 < state.spec.max_ack_pending <= len(state.pending):
                break
            if seq < state.next_seq:
                continue
            state.next_seq = seq + 1
            state.pending[seq] = _Pending(now + state.spec.ack_wait_s, 1)
            handed.append((message, 1))
        return handed

    def settle(self, consumer: str, seq: int) -> None:
        """An acknowledgement."""
        self.consumer(consumer).pending.pop(seq, None)
        if self.spec.retention is Retention.WORK_QUEUE:
            self._forget(seq)

    def due_in(self, consumer: str, seq: int, delay_s: float) -> None:
        """Hand `seq` out again after `delay_s`."""
        pending = self.consumer(consumer).pending.get(seq)
        if pending is not None:
            pending.due_at = self._now() + delay_s

    def consumer(self, name: str) -> _Consumer:
        """A consumer. Raises NotConnected like a server on which nobody answers for it."""
        if name not in self.consumers:
            raise NotConnected(f"consumer {name} of stream {self.spec.name}: nobody answers: call ensure_consumer first")
        return self.consumers[name]

    def consumer_state(self, name: str) -> ConsumerState:
        """Lag of a consumer."""
        self._expire()
        state = self.consumer(name)
        waiting = sum(1 for seq in self._messages if seq >= state.next_seq)
        redelivered = sum(1 for pending in state.pending.values() if pending.deliveries > 1)
        return ConsumerState(waiting, len(state.pending), redelivered)

    def _is_over(self, messages: int, size_bytes: int) -> bool:
        return 0 <= self.spec.max_msgs < messages or 0 <= self.spec.max_bytes < size_bytes

    def _make_room_under(self, subject: str) -> None:
        if self.spec.max_msgs_per_subject > 0:
            kept = [seq for seq, message in self._messages.items() if message.subject == subject]
            for seq in kept[: -self.spec.max_msgs_per_subject]:
                self._forget(seq)

    def _make_room(self) -> None:
        if self.spec.discard_new:
            return
        while self._messages and self._is_over(len(self._messages), sum(self._sizes.values())):
            self._forget(next(iter(self._messages)))

    def _expire(self) -> None:
        if self.spec.max_age_s > 0:
            oldest_kept = self._now() - self.spec.max_age_s
            for seq in [seq for seq, message in self._messages.items() if message.stored_at < oldest_kept]:
                self._forget(seq)

    def _forget(self, seq: int) -> None:
        self._messages.pop(seq, None)
        self._sizes.pop(seq, None)
        for consumer in self.consumers.values():
            consumer.pending.pop(seq, None)


class MemoryBucket:
    """One key-value bucket. Revisions count the writes to the whole bucket, as on a server."""

    def __init__(self, ttl_s: float, now: Callable[[], float]) -> None:
        self.ttl_s = ttl_s
        self._now = now
        self._newest: dict[str, tuple[KvEntry, float]] = {}
        self._revision = 0

    def put(self, key: str, value: bytes, last_revision: int | None) -> int:
        """Write; with `last_revision` only if it is the newest."""
        current = self.get(key)
        revision = 0 if current is None else current.revision
        if last_revision is not None and last_revision != revision:
            raise Conflict(f"key {key}: its newest revision is {revision}, not {last_revision}: read it and decide again")
        self._revision += 1
        self._newest[key] = (KvEntry(key, value, self._revision), self._now())
        return self._revision

    def get(self, key: str) -> KvEntry | None:
        """Newest value."""
        entry, written_at = self._newest.get(key, (None, 0.0))
        return None if entry is None or 0 < self.ttl_s <= self._now() - written_at else entry

    def all(self, prefix: str) -> list[KvEntry]:
        """Newest values of the keys that start with `prefix`."""
        found = (self.get(key) for key in sorted(self._newest) if key.startswith(prefix))
        return [entry for entry in found if entry is not None]


class MemoryServer:
    """Streams and buckets that several `MemoryTransport`s of one process share."""

    def __init__(self, *, max_payload_bytes: int = 1024 * 1024, now: Callable[[], float] = time.time) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.now = now
        self.streams: dict[str, MemoryStream] = {}
        self.buckets: dict[str, MemoryBucket] = {}
        self._waiting: set[asyncio.Event] = set()

    def ensure_stream(self, spec: StreamSpec) -> None:
        """Create or update."""
        if spec.name in self.streams:
            self.streams[spec.name].update(spec)
            return
        self.streams[spec.name] = MemoryStream(spec, self.now)

    def stream(self, name: str) -> MemoryStream:
        """A stream. Raises NotConnected like a server on which no stream answers."""
        if name not in self.streams:
            raise NotConnected(f"stream {name}: no stream answers: call ensure_stream first")
        return self.streams[name]

    def bucket(self, name: str) -> MemoryBucket:
        """A bucket. Raises NotConnected like a server on which no stream answers."""
        if name not in self.buckets:
            raise NotConnected(f"bucket {name}: no stream answers: call ensure_bucket first")
        return self.buckets[name]

    def changed(self) -> None:
        """Wake all who wait for a change."""
        for event in self._waiting:
            event.set()

    async def change(self, timeout_s: float) -> None:
        """Wait until something is written, at most `timeout_s`."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await event.wait()
        finally:
            self._waiting.discard(event)
