"""JetStream's rules as plain state, for `memory`: what is stored, refused and deleted. No I/O.

Time is an argument of the constructor, so that tests can advance it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from shared.transport.base import (
    Conflict,
    ConsumerSpec,
    ConsumerState,
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
from shared.transport.blobs import BLOB_HEADER, size_of
from shared.transport.memory.consumer import MemoryConsumer


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern with `*` (one token) and `>` (one or more tokens at the
    end).
    """
    wanted, tokens = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > position
        if position >= len(tokens) or token not in ("*", tokens[position]):
            return False
    return len(wanted) == len(tokens)


class MemoryStream:
    """One stream and its consumers."""

    def __init__(self, spec: StreamSpec, now: Callable[[], float]) -> None:
        self.spec = spec
        self._now = now
        self._messages: dict[int, StoredMessage] = {}
        self._sizes: dict[int, int] = {}
        self._last_seq = 0
        self._ids: dict[str, tuple[int, float]] = {}
        self._consumers: dict[str, MemoryConsumer] = {}

    def update(self, spec: StreamSpec) -> None:
        """Change the settings, as far as a server would."""
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
        """Refuse a payload before any part of it is stored."""
        if not any(matches(pattern, subject) for pattern in self.spec.subjects):
            raise NotConnected(f"publish on {subject}: stream {self.spec.name} does not take that subject")
        if 0 <= self.spec.max_msg_bytes < size_bytes:
            raise TooLarge(
                f"stream {self.spec.name} accepts payloads up to {self.spec.max_msg_bytes} bytes, "
                f"this one has {size_bytes}: not published",
                self.spec.max_msg_bytes,
            )

    def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create or update a consumer."""
        self._consumers.setdefault(spec.name, MemoryConsumer(spec, self._now)).spec = spec

    def store(self, subject: str, body: bytes, headers: Mapping[str, str], expected_last_seq: int | None) -> PubAck:
        """Apply a server's checks of a published message in its order: sequence, duplicate,
        room.
        """
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
        if spec.write_once and any(message.subject == subject for message in self._messages.values()):
            raise Conflict(f"publish on {subject} to stream {spec.name}: the subject takes one message, and has it")
        kept_bytes = len(body) + sum(len(key) + len(value) for key, value in headers.items())
        if spec.discard_new and _is_over(self.spec, len(self._messages) + 1, sum(self._sizes.values()) + kept_bytes):
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
        """Messages at or after `start_seq`, up to the one that reaches `max_bytes`."""
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
        """State of the stream."""
        self._expire()
        first = next(iter(self._messages), self._last_seq + 1 if self._last_seq else 0)
        return StreamState(first, self._last_seq, len(self._messages), sum(self._sizes.values()), self._now())

    def counts(self, subject: str) -> dict[str, int]:
        """Number of messages kept on each matching subject."""
        self._expire()
        return dict(Counter(message.subject for message in self._messages.values() if matches(subject, message.subject)))

    def purge(self, up_to_seq: int) -> None:
        """Delete messages up to `up_to_seq`."""
        if self.spec.deny_purge or self.spec.write_once:
            raise TransportError(f"stream {self.spec.name} denies purges")
        for seq in [seq for seq in self._messages if seq <= up_to_seq]:
            self._forget(seq)

    def delete(self, seq: int) -> None:
        """Delete one message."""
        if self.spec.deny_delete or self.spec.write_once:
            raise TransportError(f"stream {self.spec.name} denies deletes")
        self._forget(seq)

    def hand_out(self, consumer: str, max_messages: int) -> list[tuple[StoredMessage, int]]:
        """The next messages of a consumer with their delivery counts: first those that are due
        again, then new ones.
        """
        self._expire()
        return self.consumer(consumer).hand_out(self._messages, max_messages)

    def settle(self, consumer: str, seq: int) -> None:
        """Record an acknowledgement."""
        self.consumer(consumer).forget(seq)
        if self.spec.retention is Retention.WORK_QUEUE:
            self._forget(seq)

    def consumer(self, name: str) -> MemoryConsumer:
        """The consumer `name`. Raises NotConnected if it does not exist, like a server on which
        nobody answers for it.
        """
        if name not in self._consumers:
            raise NotConnected(f"consumer {name} of stream {self.spec.name}: nobody answers: call ensure_consumer first")
        return self._consumers[name]

    def consumer_state(self, name: str) -> ConsumerState:
        """Lag of a consumer."""
        self._expire()
        return self.consumer(name).state(self._messages)

    def _make_room_under(self, subject: str) -> None:
        if self.spec.max_msgs_per_subject > 0:
            kept = [seq for seq, message in self._messages.items() if message.subject == subject]
            for seq in kept[: -self.spec.max_msgs_per_subject]:
                self._forget(seq)

    def _make_room(self) -> None:
        if self.spec.discard_new:
            return
        while self._messages and _is_over(self.spec, len(self._messages), sum(self._sizes.values())):
            self._forget(next(iter(self._messages)))

    def _expire(self) -> None:
        if self.spec.max_age_s > 0:
            oldest_kept = self._now() - self.spec.max_age_s
            for seq in [seq for seq, message in self._messages.items() if message.stored_at < oldest_kept]:
                self._forget(seq)

    def _forget(self, seq: int) -> None:
        self._messages.pop(seq, None)
        self._sizes.pop(seq, None)
        for consumer in self._consumers.values():
            consumer.forget(seq)


def _is_over(spec: StreamSpec, messages: int, size_bytes: int) -> bool:
    return 0 <= spec.max_msgs < messages or 0 <= spec.max_bytes < size_bytes
