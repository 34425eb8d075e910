"""A node plane that refuses every write of a process that has lost its lease.

Every write first checks the lease. That leaves a gap between the check and the write, in which a
machine may be suspended for an hour. For the keys that only this process writes, the server closes
the gap: each is written by compare-and-set, and a process that takes over a lease rewrites these
keys with their present values, so that a late write of the former holder fails.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

from shared.lease.holder import Lease
from shared.transport.base import (
    Conflict,
    ConsumerSpec,
    ConsumerState,
    Counters,
    Delivery,
    Ends,
    KeyValue,
    KvEntry,
    Lowering,
    NotConnected,
    PubAck,
    StoredMessage,
    StreamSpec,
    StreamState,
    Transport,
)

_ATTEMPTS, _PAUSE_S = 10, 0.02
_WRITTEN_BY_OTHERS = "another process keeps writing it without the lease: end every process that is not a service of this version"


class FencedKeyValue:
    """The buckets of a `FencedTransport`; see `base.KeyValue`. Made by `begin`."""

    def __init__(self, kv: KeyValue, lease: Lease, revisions: dict[str, int]) -> None:
        self._kv, self._lease, self._revisions = kv, lease, revisions
        self._writing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @classmethod
    async def begin(cls, kv: KeyValue, lease: Lease, sole_keys: Sequence[str]) -> FencedKeyValue:
        """Call once the lease is taken. From then on `sole_keys` of the node's bucket belong to
        this process, and an earlier holder's writes to them fail. A key that was never written
        stays absent. Raises TransportError.
        """
        return cls(kv, lease, {key: await cls._written_again(kv, lease, key) for key in sole_keys})

    @staticmethod
    async def _written_again(kv: KeyValue, lease: Lease, key: str) -> int:
        """The key's revision after its newest value was rewritten. A conflict means that the value
        came from a server that lags behind the others; it is then read again.
        """
        for _ in range(_ATTEMPTS):
            entry = await kv.get(lease.bucket, key)
            if entry is None:
                return 0
            try:
                return await kv.update(lease.bucket, key, entry.value, last_revision=entry.revision)
            except Conflict:
                await lease.renew()
                await asyncio.sleep(_PAUSE_S)
        raise NotConnected(f"bucket {lease.bucket}, key {key}: {_WRITTEN_BY_OTHERS}")

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write. A key that belongs to this process is written only if nobody else has written it
        since. Also raises LeaseLost.
        """
        await self._lease.writable()
        if bucket != self._lease.bucket or key not in self._revisions:
            return await self._kv.put(bucket, key, value)
        async with self._writing[key]:
            for _ in range(_ATTEMPTS):
                try:
                    revision = await self._kv.update(bucket, key, value, last_revision=self._revisions[key])
                except Conflict:
                    # Read the key before renewing the lease: a process that takes the lease over
                    # after the read rewrites the key, and the update with the revision read here
                    # fails.
                    await asyncio.sleep(_PAUSE_S)
                    entry = await self._kv.get(bucket, key)
                    await self._lease.renew()
                    self._revisions[key] = entry.revision if entry is not None else 0
                else:
                    self._revisions[key] = revision
                    return revision
        raise NotConnected(f"bucket {bucket}, key {key}: {_WRITTEN_BY_OTHERS}")

    async def update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        """Write if the newest revision is still `last_revision`."""
        await self._lease.writable()
        return await self._kv.update(bucket, key, value, last_revision=last_revision)

    async def ensure(
        self,
        bucket: str,
        *,
        history: int = 1,
        ttl_s: float = 0.0,
        max_value_bytes: int = 0,
        duplicate_window_s: float = 120.0,
        replicas: int = 1,
        lowering: Lowering = Lowering.APPLY,
    ) -> None:
        """Create the bucket, or update it if it differs."""
        await self._lease.writable()
        await self._kv.ensure(
            bucket,
            history=history,
            ttl_s=ttl_s,
            max_value_bytes=max_value_bytes,
            duplicate_window_s=duplicate_window_s,
            replicas=replicas,
            lowering=lowering,
        )

    async def buckets(self) -> Sequence[str]:
        """Names of all buckets."""
        return await self._kv.buckets()

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        """The newest value of `key`."""
        return await self._kv.get(bucket, key)

    async def all(self, bucket: str, prefix: str = "") -> Sequence[KvEntry]:
        """Newest value of every key that starts with `prefix`."""
        return await self._kv.all(bucket, prefix)

    async def newest(self, bucket: str, limit: int) -> tuple[Sequence[KvEntry], int]:
        """The keys written last, and how many others there are."""
        return await self._kv.newest(bucket, limit)

    def watch(self, bucket: str, key: str, *, poll_s: float = 2.0) -> AsyncIterator[KvEntry]:
        """Each new value of `key`, the present one first."""
        return self._kv.watch(bucket, key, poll_s=poll_s)


class FencedTransport:
    """The node plane of a process with a lease; see `base.Transport`. Reading needs no lease."""

    def __init__(self, plane: Transport, lease: Lease, kv: FencedKeyValue) -> None:
        self._plane, self._lease, self._kv = plane, lease, kv

    @property
    def connected(self) -> bool:
        """Whether the server can be reached now."""
        return self._plane.connected

    @property
    def counters(self) -> Counters:
        """Connections and errors since the connection was opened."""
        return self._plane.counters

    @property
    def certificate_expires_at(self) -> float | None:
        """Unix time at which the server's certificate expires; None without TLS."""
        return self._plane.certificate_expires_at

    @property
    def kv(self) -> KeyValue:
        """The server's buckets, fenced."""
        return self._kv

    async def close(self) -> None:
        """Flush what was published, then disconnect."""
        await self._plane.close()

    async def ensure_stream(self, spec: StreamSpec, lowering: Lowering = Lowering.APPLY) -> None:
        """Create or update the stream."""
        await self._lease.writable()
        await self._plane.ensure_stream(spec, lowering)

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> None:
        """Create or update the durable consumer."""
        await self._lease.writable()
        await self._plane.ensure_consumer(stream, spec)

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
        """Store a message in `stream`."""
        await self._lease.writable()
        return await self._plane.publish(
            subject,
            payload,
            stream=stream,
            message_id=message_id,
            expected_last_seq=expected_last_seq,
            headers=headers,
            timeout_s=timeout_s,
        )

    async def fetch(self, stream: str, consumer: str, max_messages: int, timeout_s: float) -> list[Delivery]:
        """Up to `max_messages` from a durable consumer. It needs the lease, because after a loss
        they are the new holder's to work on.
        """
        await self._lease.writable()
        return await self._plane.fetch(stream, consumer, max_messages, timeout_s)

    async def payload(self, message: StoredMessage) -> bytes:
        """The payload of a message."""
        return await self._plane.payload(message)

    async def read(self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0) -> list[StoredMessage]:
        """Messages at or after `start_seq`."""
        return await self._plane.read(stream, start_seq, max_messages, timeout_s)

    async def get(self, stream: str, seq: int) -> StoredMessage | None:
        """The message at exactly `seq`."""
        return await self._plane.get(stream, seq)

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The newest message on `subject`."""
        return await self._plane.last(stream, subject)

    async def ends(self, stream: str, start_seq: int = 1, timeout_s: float = 5.0, *, newest: bool = True) -> Ends:
        """The oldest message at or after `start_seq` and the newest."""
        return await self._plane.ends(stream, start_seq, timeout_s, newest=newest)

    async def stream_state(self, stream: str) -> StreamState:
        """How full a stream is."""
        return await self._plane.stream_state(stream)

    async def counts(self, stream: str, subject: str) -> Mapping[str, int]:
        """How many messages the stream keeps on each subject."""
        return await self._plane.counts(stream, subject)

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """Lag of a consumer."""
        return await self._plane.consumer_state(stream, consumer)

    async def purge(self, stream: str, up_to_seq: int) -> None:
        """Forget messages up to `up_to_seq`."""
        await self._lease.writable()
        await self._plane.purge(stream, up_to_seq)

    async def delete(self, stream: str, seq: int) -> None:
        """Forget one message."""
        await self._lease.writable()
        await self._plane.delete(stream, seq)
