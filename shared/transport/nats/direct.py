"""Reads a stream without a consumer, by (batched) direct get (ADR-31).

nats-py supports only the single get. A batch is one request with many replies. Each reply names the
sequence before it (`Nats-Last-Sequence`), so a lost reply is noticed; the last one is a status 204.
A foreign publisher's headers cannot imitate either: the server overwrites its own header names in
stored messages, and a status has no `Nats-Sequence`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors

from shared.transport.base import Deadline, Ends, NoStream, NotConnected, StoredMessage, TransportError
from shared.transport.blobs import BLOB_HEADER, UNKNOWN_SIZE, size_of
from shared.transport.nats.answers import count_in, quote_server, readable
from shared.transport.nats.client import LARGEST_MESSAGE_BYTES, OVERSIZED_HEADER
from shared.transport.nats.connection import Connection, lost

REPLY_BYTES = 16 * 1024 * 1024
"""Largest answer to one request. A batch has no flow control, so this limits what the server
sends.
"""
READ_BYTES = 64 * 1024 * 1024
"""One `read` returns at most this many bytes of bodies and headers, plus the last message."""
MAX_BATCH = 1024
_SENT_MOST = 2
"""Tolerance factor, because the server counts the bytes of a batch slightly differently."""
_SHORTEST_SILENCE_S = 2.0
_NOBODY_S = 1.0
"""How long a stream for which nobody answers is asked for its ends."""
_AGAIN_S = 0.1
"""Before the same request is made again."""
_SERVER_HEADERS = frozenset(
    {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence"}
    | {"Nats-Expected-Stream", "Nats-Expected-Last-Sequence", "Nats-Expected-Last-Subject-Sequence"}
)


@dataclass(frozen=True, slots=True)
class Page:
    """Replies to one batched get. `next_seq` is where the next one continues; None if the stream
    has no more messages.

    `size_bytes` counts bodies and headers, including those of unreadable messages. `pending`: how
    many messages follow; None if the server did not get to say it.
    """

    messages: list[StoredMessage]
    next_seq: int | None
    size_bytes: int = 0
    too_many_subjects: bool = False
    pending: int | None = None


class _Nobody(Exception):
    """Nobody answered the request."""


def stored_message(stream: str, subject: str, seq: int, stored_at: float, body: bytes, headers: Mapping[str, str]) -> StoredMessage:
    """A message as the interface represents it. If its headers were not parsed it has no payload,
    and a size above every limit.
    """
    oversized = OVERSIZED_HEADER in headers
    return StoredMessage(
        stream=stream,
        seq=seq,
        subject=subject,
        size_bytes=UNKNOWN_SIZE if oversized else size_of(headers, body),
        stored_at=stored_at,
        inline=None if oversized or BLOB_HEADER in headers else body,
        headers={str(key): value for key, value in headers.items() if key not in _SERVER_HEADERS},
    )


def parse_reply(stream: str, reply: Any) -> StoredMessage | None:
    """The message in the reply to a direct get; None for a status, or if a foreign publisher's
    headers made it unreadable.
    """
    headers = reply.headers or {}
    try:
        return stored_message(
            stream,
            headers["Nats-Subject"],
            count_in(headers, "Nats-Sequence"),
            datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp(),
            bytes(reply.data),
            headers,
        )
    except (KeyError, ValueError, OverflowError):
        return None


async def get(connection: Connection, stream: str, request: Mapping[str, Any], deadline: Deadline) -> StoredMessage | None:
    """One message, requested as `{"seq": n}`, that with `"next_by_subj": s`, or
    `{"last_by_subj": s}`.
    """
    reply = await connection.request(
        f"{connection.options.api_prefix}.DIRECT.GET.{stream}",
        json.dumps(request).encode(),
        deadline,
        what=f"direct get from stream {stream}",
    )
    return parse_reply(stream, reply)


async def last_values(connection: Connection, stream: str, subject: str, deadline: Deadline) -> list[StoredMessage] | None:
    """The newest message of each subject that matches `subject`; None if they are too many or too
    large for one answer.
    """
    request = {"multi_last": [subject], "batch": MAX_BATCH}
    while True:
        page = await batch(connection, stream, request, deadline, nobody_s=_NOBODY_S)
        if page.next_seq is None:
            return None if page.too_many_subjects else page.messages
        if page.pending is not None or deadline.passed:
            return None
        await asyncio.sleep(min(_AGAIN_S, deadline.left_s))  # a part of the answer was lost


async def read(
    connection: Connection,
    stream: str,
    start_seq: int,
    max_messages: int,
    deadline: Deadline,
    max_bytes: int = READ_BYTES,
    subject: str = ">",
) -> list[StoredMessage]:
    """Up to `max_messages` of `subject` at or after `start_seq`, ending with the one that reaches
    `max_bytes`, or at the deadline.
    """
    found: list[StoredMessage] = []
    held_bytes, position = 0, max(1, start_seq)
    while len(found) < max_messages and held_bytes < max_bytes:
        request = _at(position, min(max_messages - len(found), MAX_BATCH), subject)
        try:
            page = await batch(connection, stream, request, deadline, min(REPLY_BYTES, max_bytes - held_bytes))
        except NotConnected:
            if found:
                break
            raise
        found += page.messages
        held_bytes += page.size_bytes
        if page.next_seq is None:
            break
        position = page.next_seq
    return found


def _at(seq: int, most: int, subject: str) -> dict[str, Any]:
    return {"seq": seq, "batch": most, **({} if subject == ">" else {"next_by_subj": subject})}


async def ends(
    connection: Connection, stream: str, start_seq: int, deadline: Deadline, *, newest: bool = True, subject: str = ">"
) -> Ends:
    """The oldest message of `subject` at or after `start_seq`, the newest one unless `newest` is
    false, and how many there are. Raises NoStream after a second in which nobody answers.
    """
    position, most = max(1, start_seq), 1
    while True:
        page = await batch(connection, stream, _at(position, most, subject), deadline, nobody_s=_NOBODY_S)
        if page.messages and page.pending is not None:
            break
        if page.next_seq is None:
            return Ends()
        if page.messages:  # a part of the answer was lost
            await asyncio.sleep(min(_AGAIN_S, deadline.left_s))
        else:  # what a foreign publisher made unreadable, of which there may be many
            position, most = page.next_seq, MAX_BATCH
        if deadline.passed:
            raise NotConnected(f"direct get from stream {stream} at {connection.options.url}: no complete answer in time")
    first, messages = page.messages[0], page.pending + len(page.messages)
    if not newest:
        return Ends(first, None, messages)
    last = await get(connection, stream, {"last_by_subj": subject}, deadline) if page.pending else page.messages[-1]
    if last is None or last.seq < first.seq:  # of a copy that lags, or removed meanwhile
        last = first
    return Ends(first, last, messages)


async def batch(
    connection: Connection,
    stream: str,
    request: Mapping[str, Any],
    deadline: Deadline,
    max_bytes: int = REPLY_BYTES,
    nobody_s: float | None = None,
) -> Page:
    """One batched get, which ends with the message that reaches `max_bytes`. If it is interrupted,
    it returns the unbroken sequence of messages that arrived, or is retried if there is none.
    `nobody_s`: how long it is retried where nobody answers; None: until the deadline.

    Raises:
        NoStream: nobody answered in the end.
        NotConnected: no answer before the deadline.
    """
    body = json.dumps({**request, "max_bytes": max_bytes}).encode()
    what = f"direct get from stream {stream} at {connection.options.url}"
    absent = f"{what}: no (complete) answer: the stream does not exist there, or the server is starting"
    nobody_until: Deadline | None = None
    while not deadline.passed and await connection.until_connected(deadline):
        try:
            async with connection.replies(f"{connection.options.api_prefix}.DIRECT.GET.{stream}", body) as replies:
                page = await _collect(stream, replies, deadline, max_bytes, request.get("seq", 0))
        except _Nobody:
            page = None
            nobody_until = nobody_until or Deadline(deadline.left_s if nobody_s is None else min(nobody_s, deadline.left_s))
            if nobody_until.passed:
                break
        except nats.errors.Error:
            page, nobody_until = None, None
        else:
            nobody_until = None
        if page is not None:
            return page
        await asyncio.sleep(min(_AGAIN_S, deadline.left_s))
    if nobody_until is not None:
        raise NoStream(absent)
    raise NotConnected(absent) if connection.connected else lost(what, connection.options)


async def _collect(
    stream: str, replies: asyncio.Queue[Any], deadline: Deadline, max_bytes: int = REPLY_BYTES, from_seq: int = 0
) -> Page | None:
    """The replies to one batched get, up to the status that ends it. Also stops if there are more
    than were requested, which an honest server does not send, and refuses what was stored before
    `from_seq`. A status after nothing, which says that more follows, is an interrupted answer.
    """
    what = f"direct get from stream {stream}"
    messages: list[StoredMessage] = []
    previous: int | None = 0
    size_bytes = 0
    for _ in range(MAX_BATCH + 1):
        if size_bytes > _SENT_MOST * max_bytes + LARGEST_MESSAGE_BYTES:
            break
        try:
            # Half of the remaining time: a large message on a slow line has time to arrive, and a
            # lost request can be repeated.
            silence_s = min(max(_SHORTEST_SILENCE_S, deadline.left_s / 2), deadline.left_s)
            async with asyncio.timeout(silence_s):
                reply = await replies.get()
        except TimeoutError:
            return _interrupted(messages, size_bytes)
        message = parse_reply(stream, reply)
        headers = reply.headers or {}
        if message is None and "Nats-Sequence" not in headers and (status := headers.get("Status")):
            if status == "204":
                with readable(what):
                    last = count_in(headers, "Nats-Last-Sequence", 0)
                    pending = count_in(headers, "Nats-Num-Pending", 0)
                broken = messages and previous is not None and previous != last
                if broken or (pending > 0 and (not size_bytes or last < from_seq)):  # asked on from `last`, it would not end
                    return _interrupted(messages, size_bytes)
                return Page(messages, last + 1 if pending > 0 else None, size_bytes, pending=pending)
            if status == "404":
                return Page([], None)
            if status == "413":
                return Page([], None, too_many_subjects=True)
            if status == "503":
                raise _Nobody
            raise TransportError(f"{what}: {quote_server(status)} {quote_server(headers.get('Description', ''))}")
        with readable(what):
            size_bytes += len(reply.data) + _header_bytes(headers)
            before = count_in(headers, "Nats-Last-Sequence", previous or 0)
        if message is None:
            previous = None
            continue
        if message.seq < from_seq:
            raise TransportError(f"{what}: the server's answer is an earlier message than was asked for")
        if previous is not None and before != previous:
            return _interrupted(messages, size_bytes)
        messages.append(message)
        previous = message.seq
    return _interrupted(messages, size_bytes)


def _header_bytes(headers: Mapping[str, str]) -> int:
    """Size of a message's headers, whether or not they were parsed."""
    return int(headers.get(OVERSIZED_HEADER, 0)) + sum(map(len, headers.values()))


def _interrupted(messages: list[StoredMessage], size_bytes: int) -> Page | None:
    return Page(messages, messages[-1].seq + 1, size_bytes) if messages else None
