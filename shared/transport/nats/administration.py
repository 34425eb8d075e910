"""Requests about whole streams, which only an operator may make: lists of streams and consumers,
page by page (JetStream lists 256 at a time), and a stream as one file and back.

The file is JetStream's snapshot: a stream's settings, messages and durable consumers, compressed
and opaque to us. Taking one: `$JS.API.STREAM.SNAPSHOT.<stream>` is answered with settings and
state, and the file comes in chunks to a subject of the asker's, each to be acknowledged where it
says so. An empty message ends it, with a status other than 204 if it failed.

Restoring one: `$JS.API.STREAM.RESTORE.<stream>` is answered with a subject that takes the chunks,
one acknowledged before the next; an empty one makes the stream, and is answered with its state.

A snapshot is never requested twice: the second request would send another file among the chunks of
the first. Sources: `snapshots.go` in nats-io/jsm.go, `jetstream_api.go` in nats-server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import nats.errors

from shared.cancelling import cancel_and_wait, together
from shared.transport.base import Deadline, NotConnected, TransportError
from shared.transport.nats.answers import count_of, quote_server, readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import answered, call

T = TypeVar("T")
CHUNK_BYTES = 128 * 1024
WINDOW_BYTES = 4 * 1024 * 1024
"""On their way at once: well below the unread data at which a server cuts a connection
(`max_pending`).
"""
ANSWER_S = 15.0
"""For the first answer: a snapshot is prepared, a stream's place is chosen by a majority."""
SILENCE_S = 10.0
"""The server gives a transfer up after 5 s without a sign of the other side."""
_LOOK_S = 0.25
_INTEREST_S = 3.0
"""Less than the server's own patience with a transfer."""
_INTEREST_WAIT_S = 0.02
_ENDED_WELL = ("", "204")


class TransferLost(TransportError):
    """The transfer broke off, as when a server was restarted: the same again may succeed."""


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """State of a stream whose snapshot the server took."""

    config: dict[str, Any]
    state: dict[str, Any]


async def take_snapshot(connection: Connection, stream: str, write: Callable[[bytes], object]) -> StreamSnapshot:
    """Pass the snapshot of `stream` to `write`, chunk by chunk.

    Raises:
        ApiError: the server refuses.
        NotConnected: nobody answers: no such stream, or it has no leader.
        TransferLost: it broke off; what was written so far is to be thrown away.
    """
    client, epoch, what = connection.client, connection.epoch, f"snapshot of stream {stream}"
    chunks: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(message: Any) -> None:
        chunks.put_nowait(message)

    inbox = client.new_inbox()
    # Both limits are off: what is on its way is bounded by the window.
    subscription = await client.subscribe(inbox, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0)
    try:
        request = {"deliver_subject": inbox, "chunk_size": CHUNK_BYTES, "window_size": WINDOW_BYTES}
        answer = await _ask(connection, f"STREAM.SNAPSHOT.{stream}", request, what)
        with readable(what):
            taken = StreamSnapshot(dict(answer["config"]), dict(answer["state"]))
        expected = 1
        while True:
            try:
                message = await _while_connected(connection, chunks.get(), SILENCE_S)
            except TimeoutError:
                raise TransferLost(f"{what}: the server fell silent or was restarted") from None
            if not message.data:
                break
            if message.reply:
                if message.reply.rpartition(".")[2] != str(expected):
                    raise TransferLost(f"{what}: a part of it was lost on the way")
                expected += 1
            write(message.data)
            if message.reply:
                await client.publish(message.reply, b"")
        status = (message.headers or {}).get("Status", "")
        if status not in _ENDED_WELL:
            reason = (message.headers or {}).get("Description", "")
            raise TransferLost(f"{what}: the server gave up: {quote_server(status)} {quote_server(reason)}")
        if connection.epoch != epoch:  # the last chunk has no number
            raise TransferLost(f"{what}: the connection was lost meanwhile")
        return taken
    finally:
        with suppress(nats.errors.Error):
            await subscription.unsubscribe()


async def restore_snapshot(
    connection: Connection,
    config: dict[str, Any],
    state: dict[str, Any],
    chunks: Iterable[bytes],
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Make the stream of a snapshot; its information as the server has it then.

    Args:
        connection: To a server, as a user who may make streams.
        config: The stream's settings, which win over those in the snapshot.
        state: What the server said when it took the snapshot.
        chunks: The file, in pieces of `CHUNK_BYTES` at most. If getting the next one raises, even
            after the last, no stream is made.
        timeout_s: How long the server may take to write what it was sent.

    Raises:
        ApiError: the server refuses: it is there already, has no room, or cannot read the file.
        TransferLost: it broke off.
    """
    stream = config["name"]
    what = f"restore of stream {stream}"
    answer = await _ask(connection, f"STREAM.RESTORE.{stream}", {"config": config, "state": state}, what)
    with readable(what):
        target = str(answer["deliver_subject"])
    for chunk in chunks:
        await _send(connection, target, chunk, SILENCE_S, what)
    made = await _send(connection, target, b"", timeout_s, what)
    if "config" not in made:
        raise TransferLost(f"{what}: the server did not say that the stream is there")
    return made


async def _ask(connection: Connection, subject: str, request: dict[str, Any], what: str) -> dict[str, Any]:
    answer = None
    with suppress(nats.errors.NoRespondersError):
        answer = await _once(connection, f"{connection.options.api_prefix}.{subject}", json.dumps(request).encode(), ANSWER_S)
    if answer is None:
        raise NotConnected(f"{what}: nobody answers: no leader, no such stream, or this key may not ask for it")
    return answered(answer, what)


async def _send(connection: Connection, subject: str, chunk: bytes, timeout_s: float, what: str) -> dict[str, Any]:
    """Raises TransferLost without an answer. Sent again only where nobody was there to receive it:
    in a cluster the subject may be known before every server knows who listens on it.
    """
    answer, heard_by = None, Deadline(_INTEREST_S)
    while True:
        try:
            answer = await _once(connection, subject, chunk, timeout_s)
            break
        except nats.errors.NoRespondersError:
            if heard_by.passed:
                break
            await asyncio.sleep(_INTEREST_WAIT_S)
    if answer is None:
        raise TransferLost(f"{what}: the server stopped answering or was restarted")
    return answered(answer, what) if answer else {}


async def _once(connection: Connection, subject: str, payload: bytes, timeout_s: float) -> bytes | None:
    """The answer to a request that is sent once; None where there is none. Raises NoRespondersError
    where the request reached nobody.
    """
    try:
        asking = connection.client.request(subject, payload, timeout=timeout_s)
        return bytes((await _while_connected(connection, asking, timeout_s)).data)
    except nats.errors.NoRespondersError:
        raise
    except (TimeoutError, nats.errors.Error):
        return None


async def _while_connected(connection: Connection, waiting: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """The result of `waiting`. Raises TimeoutError as soon as the connection is another one: what
    the server had begun on the one before is not continued, and a restore may be given an hour.
    """
    deadline, epoch = Deadline(timeout_s), connection.epoch
    task = asyncio.create_task(waiting)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=min(_LOOK_S, deadline.left_s))
            if not task.done() and (deadline.passed or not connection.connected or connection.epoch != epoch):
                raise TimeoutError
        return task.result()
    finally:
        await cancel_and_wait(task)


MOST_LISTED = 16_384
"""Of one list: more is not listed, and said to be left out."""
_AT_ONCE = 8
"""Lists asked for at once: a server answers its API one request after the other."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries of a list in the server's words."""

    entries: list[dict[str, Any]]
    missing: list[str]
    """Names of those that exist and of which no server says more: they have no leader."""
    left_out: int = 0


async def account(connection: Connection, deadline: Deadline) -> dict[str, Any]:
    """Usage and limits of the user's account."""
    found: dict[str, Any] = await call(connection, "INFO", None, deadline, "the account's figures")
    return found


async def streams(connection: Connection, deadline: Deadline) -> Listing:
    """All streams of the account, by name."""
    return await _pages(connection, "STREAM.LIST", "streams", "the list of streams", deadline)


async def consumers(connection: Connection, names: Iterable[str], deadline: Deadline) -> dict[str, Listing]:
    """All consumers of each of the streams."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(stream: str) -> Listing:
        async with places:
            what = f"the list of consumers of stream {stream}"
            return await _pages(connection, f"CONSUMER.LIST.{stream}", "consumers", what, deadline)

    chosen = list(names)
    return dict(zip(chosen, await together(*map(one, chosen)), strict=True))


async def _pages(connection: Connection, subject: str, field: str, what: str, deadline: Deadline) -> Listing:
    """Ask until the server has no more. What it says of the total is not trusted to end: a page
    without a new entry does, and so does `MOST_LISTED`.
    """
    found: dict[str, dict[str, Any]] = {}
    missing: dict[str, None] = {}
    offset = total = 0
    while offset < MOST_LISTED:
        page = await call(connection, subject, {"offset": offset}, deadline, what)
        with readable(what):
            total = count_of(page["total"])
            entries = {_name(entry): entry for entry in page.get(field) or []}
            lost = [str(name) for name in page.get("missing") or []]
        known = len(found) + len(missing)
        found |= entries
        missing |= dict.fromkeys(lost)
        offset += len(entries) + len(lost)
        if offset >= total or len(found) + len(missing) == known:
            break
    return Listing([found[name] for name in sorted(found)], sorted(missing), max(0, total - offset))


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"] if "name" in entry else entry["config"]["name"])
