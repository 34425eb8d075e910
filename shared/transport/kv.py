"""Small shared state in key-value buckets (ADR-8), by direct get and plain publishes.

A watch has no consumer on the server, so none can be lost: it listens to the bucket's own subject as a hint that something
was written, reads the value by direct get, and reads every few seconds besides.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import nats.errors
import structlog

from shared.transport import direct
from shared.transport.base import KvEntry, StoredMessage, StreamState, TransportError
from shared.transport.connection import Connection
from shared.transport.deadline import Deadline

log = structlog.get_logger(__name__)

KV_TIMEOUT_S = 5.0
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_STORED_SOON_S = (0.0, 0.01, 0.05, 0.2)
"""A hint may arrive before the value is stored: when to look."""


def subject(bucket: str, key: str) -> str:
    """Subject of a key. Raises TransportError for a key that cannot be one."""
    if not _KEY.fullmatch(key):
        raise TransportError(f"bucket {bucket}: {key!r} is no valid key: use letters, digits, - / _ = and single dots")
    return f"$KV.{bucket}.{key}"


def entry(bucket: str, message: StoredMessage | None) -> KvEntry | None:
    """The entry in a stored message; None for a deletion marker."""
    if message is None or message.inline is None or "KV-Operation" in message.headers:
        return None
    return KvEntry(message.subject.removeprefix(f"$KV.{bucket}."), message.inline, message.seq)


async def get(connection: Connection, bucket: str, key: str) -> KvEntry | None:
    """Newest value of `key`."""
    request = {"last_by_subj": subject(bucket, key)}
    return entry(bucket, await direct.get(connection, f"KV_{bucket}", request, Deadline(KV_TIMEOUT_S)))


async def get_all(connection: Connection, bucket: str, prefix: str) -> list[KvEntry]:
    """Newest value of every key that starts with `prefix`, in one request where the bucket is small enough (1024 keys)."""
    deadline = Deadline(KV_TIMEOUT_S)
    stem = prefix[: prefix.rfind(".") + 1]
    page = await direct.batch(connection, f"KV_{bucket}", {"multi_last": [f"$KV.{bucket}.{stem}>"], "batch": 1024}, deadline)
    newest = {message.subject: message for message in page.messages}
    if page.too_many_subjects or page.next_seq is not None:
        newest, position = {}, 1
        while messages := await direct.read(connection, f"KV_{bucket}", position, direct.MAX_BATCH, deadline):
            newest |= {message.subject: message for message in messages}
            position = messages[-1].seq + 1
    entries = [found for message in newest.values() if (found := entry(bucket, message)) and found.key.startswith(prefix)]
    return sorted(entries, key=lambda found: found.key)


async def newest(connection: Connection, bucket: str, limit: int, fill: StreamState) -> tuple[list[KvEntry], int]:
    """The keys written last, newest first, and how many others the bucket holds by `fill`, its present state.

    Reads a window of `limit` sequences at the end, or everything where that is no more. A bucket that also holds older values of
    its keys, or whose keys were mostly rewritten, gives fewer entries than `limit`.
    """
    first = fill.first_seq if fill.messages <= limit else max(fill.first_seq, fill.last_seq - limit + 1)
    messages = await direct.read(connection, f"KV_{bucket}", first, limit, Deadline(KV_TIMEOUT_S)) if fill.messages else []
    last = {message.subject: message for message in messages}
    entries = [found for message in last.values() if (found := entry(bucket, message))]
    return sorted(entries, key=lambda found: -found.revision), max(0, fill.messages - len(messages))


async def watch(
    connection: Connection, bucket: str, key: str, poll_s: float, last_seq: Callable[[], Awaitable[int]]
) -> AsyncIterator[KvEntry]:
    """Each new value of `key`, the present one first. `last_seq` is the bucket's, asked only if a revision went backwards."""
    revision, hinted = 0, asyncio.Event()
    hints = _Hints(connection, subject(bucket, key), hinted)
    try:
        while True:
            await hints.listen()
            by_hint = hinted.is_set()
            hinted.clear()
            for wait_s in _STORED_SOON_S if by_hint else (0.0,):
                await asyncio.sleep(wait_s)
                found = await _look(connection, bucket, key, revision, last_seq)
                if found is not None:
                    revision = found.revision
                    yield found
                    break
            with suppress(TimeoutError):
                async with asyncio.timeout(poll_s):
                    await hinted.wait()
    finally:
        await hints.stop()


async def _look(
    connection: Connection, bucket: str, key: str, revision: int, last_seq: Callable[[], Awaitable[int]]
) -> KvEntry | None:
    """The value if it is new. An older revision is a replica that lags, unless the bucket was made anew."""
    try:
        found = await get(connection, bucket, key)
        if found is None or found.revision == revision:
            return None
        if found.revision < revision and await last_seq() >= revision:
            return None
        return found
    except TransportError as error:
        log.warning("watch_could_not_read", bucket=bucket, key=key, error=str(error), effect="tried again")
        return None


class _Hints:
    """A subscription that sets an event, renewed when the connection's client was replaced."""

    def __init__(self, connection: Connection, subject: str, hinted: asyncio.Event) -> None:
        self._connection = connection
        self._subject = subject
        self._hinted = hinted
        self._client: Any = None
        self._subscription: Any = None

    async def listen(self) -> None:
        if self._client is self._connection.client:
            return
        with suppress(nats.errors.Error):
            self._subscription = await self._connection.client.subscribe(self._subject, cb=self._hint)
            self._client = self._connection.client

    async def stop(self) -> None:
        if self._subscription is not None:
            with suppress(nats.errors.Error):
                await self._subscription.unsubscribe()

    async def _hint(self, message: Any) -> None:
        self._hinted.set()
