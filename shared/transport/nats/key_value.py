"""Key-value buckets on a server, by direct get and plain publishes.

A watch has no consumer on the server, so none can be lost. It subscribes to the bucket's subject as
a hint that something was written, reads the value by direct get, and also reads every few seconds.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Any

import nats.errors
import structlog

from shared.transport.base import (
    Deadline,
    Fence,
    KvEntry,
    Lowering,
    StoredMessage,
    StreamFull,
    StreamState,
    TooLarge,
    TransportError,
    bucket_of_stream,
    bucket_stream,
)
from shared.transport.nats import direct
from shared.transport.nats import jetstream_api as api
from shared.transport.nats.answers import count_of, readable
from shared.transport.nats.connection import Connection

log = structlog.get_logger(__name__)

KV_TIMEOUT_S = 5.0
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
BUCKETS_TIMEOUT_S = 10.0
MOST_BUCKETS = 16_384
_STORED_SOON_S = (0.0, 0.01, 0.05, 0.2)
"""A hint may arrive before the value is stored; these are the delays before reading."""


class NatsKeyValue:
    """See `base.KeyValue`."""

    def __init__(self, connection: Connection, fence: Fence | None = None) -> None:
        self._connection, self._fence = connection, fence

    async def ensure(
        self,
        bucket: str,
        *,
        history: int = 1,
        ttl_s: float = 0.0,
        max_value_bytes: int = 0,
        max_bytes: int = 0,
        max_values: int = 0,
        duplicate_window_s: float = 120.0,
        replicas: int = 1,
        lowering: Lowering = Lowering.APPLY,
    ) -> None:
        if self._fence is not None:
            await self._fence.writable()
        config = api.bucket_config(bucket, history, ttl_s, replicas, max_value_bytes, max_bytes, max_values, duplicate_window_s)
        await api.ensure_stream(self._connection, config, lowering)

    async def buckets(self) -> Sequence[str]:
        """Names of all buckets, sorted; at most `MOST_BUCKETS`, however many the server says there
        are.
        """
        what, names, deadline = "names of the buckets", list[str](), Deadline(BUCKETS_TIMEOUT_S)
        while True:
            request = {"subject": "$KV.>", "offset": len(names)}
            answer = await api.call(self._connection, "STREAM.NAMES", request, deadline, what)
            with readable(what):
                page = [bucket_of_stream(name) for name in answer.get("streams") or []]
                names += page
                if not page or len(names) >= min(count_of(answer["total"]), MOST_BUCKETS):
                    return sorted(names[:MOST_BUCKETS])

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        request = {"last_by_subj": _subject(bucket, key)}
        found = await direct.get(self._connection, bucket_stream(bucket), request, Deadline(KV_TIMEOUT_S))
        return _entry(bucket, found)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write unconditionally, but a key that the fence owns as the fence does."""
        if self._fence is not None and self._fence.owns(bucket, key):
            return await self._fence.put(key, value)
        return await self._write(bucket, key, value, {})

    async def update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        return await self._write(bucket, key, value, {"Nats-Expected-Last-Subject-Sequence": str(last_revision)})

    async def newest(self, bucket: str, limit: int, prefix: str = "") -> tuple[Sequence[KvEntry], int]:
        """The values of all keys in one request; if they are too many or too large for that, those
        among the newest `limit` sequences of the bucket. A bucket that also holds older values, or
        whose keys were mostly rewritten, then gives fewer than `limit`.
        """
        stream, deadline = bucket_stream(bucket), Deadline(KV_TIMEOUT_S)
        subject = f"$KV.{bucket}.{prefix[: prefix.rfind('.') + 1]}>"
        page = await direct.last_values(self._connection, stream, subject, deadline)
        if page is not None:
            found = self._entries(bucket, page, prefix)
            return found[:limit], len(found[limit:])
        fill = await direct.ends(self._connection, stream, 1, deadline)
        first = fill.first_seq if fill.messages <= limit else max(fill.first_seq, fill.last_seq - limit + 1)
        messages = await direct.read(self._connection, stream, first, limit, deadline, subject=subject)
        of_prefix = await direct.ends(self._connection, stream, 1, deadline, newest=False, subject=subject)
        return self._entries(bucket, messages, prefix), max(1, of_prefix.messages - len(messages))

    @staticmethod
    def _entries(bucket: str, messages: Iterable[StoredMessage], prefix: str) -> list[KvEntry]:
        last = {message.subject: message for message in messages}
        found = (entry for message in last.values() if (entry := _entry(bucket, message)) is not None)
        return sorted((entry for entry in found if entry.key.startswith(prefix)), key=lambda entry: -entry.revision)

    async def watch(self, bucket: str, key: str, *, poll_s: float = 2.0) -> AsyncIterator[KvEntry]:
        revision, hinted = 0, asyncio.Event()
        hints = _Hints(self._connection, _subject(bucket, key), hinted)
        try:
            while True:
                await hints.listen()
                by_hint = hinted.is_set()
                hinted.clear()
                for wait_s in _STORED_SOON_S if by_hint else (0.0,):
                    await asyncio.sleep(wait_s)
                    found = await self._look(bucket, key, revision)
                    if found is not None:
                        revision = found.revision
                        yield found
                        break
                with suppress(TimeoutError):
                    async with asyncio.timeout(poll_s):
                        await hinted.wait()
        finally:
            await hints.stop()

    async def _look(self, bucket: str, key: str, revision: int) -> KvEntry | None:
        """The value if it is new. An older revision comes from a replica that lags, unless the
        bucket was created again.
        """
        try:
            found = await self.get(bucket, key)
            if found is None or found.revision == revision:
                return None
            if found.revision < revision and (await self._fill(bucket)).last_seq >= revision:
                return None
            return found
        except TransportError as error:
            log.warning("watch_could_not_read", bucket=bucket, key=key, error=str(error), effect="tried again")
            return None

    async def _fill(self, bucket: str) -> StreamState:
        """The leader's, because a direct get may be answered by the copy that lags. Only buckets of
        nodes are watched.
        """
        return await api.stream_state(self._connection, bucket_stream(bucket))

    async def _write(self, bucket: str, key: str, value: bytes, headers: dict[str, str]) -> int:
        if self._fence is not None:
            await self._fence.writable()
        limit = self._connection.inline_limit_bytes
        if len(value) > limit:
            raise TooLarge(f"bucket {bucket}: values up to {limit} bytes, {key} has {len(value)}: use a stream")
        headers["Nats-Msg-Id"] = uuid.uuid4().hex
        # A leaf server keeps plain `$KV.` subjects to itself; writes to another domain go through
        # its API prefix.
        options = self._connection.options
        subject = f"{options.api_prefix}.{_subject(bucket, key)}" if options.domain else _subject(bucket, key)
        try:
            return (await api.store(self._connection, subject, value, bucket_stream(bucket), headers, Deadline(KV_TIMEOUT_S))).seq
        except StreamFull:
            raise StreamFull(bucket_full(bucket, key)) from None


class _Hints:
    """A subscription that sets an event. It is renewed when the connection's client was
    replaced.
    """

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


def bucket_full(bucket: str, key: str) -> str:
    """Say that `key` could not be written, why, and what to do."""
    stream = bucket_stream(bucket)
    return (
        f"bucket {bucket} is full, so {key} was not written: somebody has written more keys than this version's processes do. The "
        f"server's operator sees which (`nats stream subjects {stream}`) and removes them "
        f"(`nats stream purge {stream} --subject '$KV.{bucket}.KEYS'`)"
    )


def _subject(bucket: str, key: str) -> str:
    if not _KEY.fullmatch(key):
        raise TransportError(f"bucket {bucket}: {key!r} is not a valid key: use letters, digits, - / _ = and single dots")
    return f"$KV.{bucket}.{key}"


def _entry(bucket: str, message: StoredMessage | None) -> KvEntry | None:
    """The entry in a stored message; None for a deletion marker."""
    if message is None or message.inline is None or "KV-Operation" in message.headers:
        return None
    return KvEntry(message.subject.removeprefix(f"$KV.{bucket}."), message.inline, message.seq, message.stored_at)
