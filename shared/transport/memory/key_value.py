"""Small shared state of the in-memory transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from shared.transport import keys
from shared.transport.base import KvEntry, Lowering, NotConnected, WouldLower, lowered
from shared.transport.memory.bucket import MemoryBucket
from shared.transport.memory.link import MemoryLink


class MemoryKeyValue:
    """See `base.KeyValue`."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link

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
        """Create or update the bucket. `history` and `replicas` have no effect, because only the
        newest values can be read; nor has `duplicate_window_s`, because nothing is written twice.
        """
        server = self._link.server
        if lowering is Lowering.LOOK and bucket not in server.buckets:
            return
        existing = server.buckets.setdefault(bucket, MemoryBucket(ttl_s, server.now, max_value_bytes))
        wanted = {"max_age": ttl_s, "max_msg_size": max_value_bytes}
        actual = {"max_age": existing.ttl_s, "max_msg_size": existing.max_value_bytes}
        if lowering is not Lowering.APPLY and (lower := lowered(wanted, actual, wanted)):
            if lowering is not Lowering.KEEP:
                raise WouldLower(bucket, wanted, actual, lower)
            return
        if lowering is not Lowering.LOOK:
            existing.ttl_s, existing.max_value_bytes = ttl_s, max_value_bytes

    async def buckets(self) -> Sequence[str]:
        """Names of all buckets, sorted."""
        return sorted(self._link.server.buckets)

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        """The newest value of `key`."""
        keys.subject(bucket, key)
        return self._link.server.bucket(bucket).get(key)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        """Write unconditionally."""
        return self._write(bucket, key, value, None)

    async def update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        """Write if the newest revision is still `last_revision`."""
        return self._write(bucket, key, value, last_revision)

    async def all(self, bucket: str, prefix: str = "") -> Sequence[KvEntry]:
        """Newest value of every key that starts with `prefix`."""
        return self._link.server.bucket(bucket).all(prefix)

    async def newest(self, bucket: str, limit: int) -> tuple[Sequence[KvEntry], int]:
        """The keys written last, and the number of other keys."""
        entries = sorted(self._link.server.bucket(bucket).all(""), key=lambda found: -found.revision)
        return entries[:limit], max(0, len(entries) - limit)

    async def watch(self, bucket: str, key: str, *, poll_s: float = 2.0) -> AsyncIterator[KvEntry]:
        """Each new value of `key`, beginning with the present one."""
        revision = 0
        while True:
            with suppress(NotConnected):
                entry = self._link.server.bucket(bucket).get(key)
                if entry is not None and entry.revision != revision:
                    revision = entry.revision
                    yield entry
                    continue
            await self._link.change(poll_s)

    def _write(self, bucket: str, key: str, value: bytes, last_revision: int | None) -> int:
        keys.subject(bucket, key)
        revision = self._link.server.bucket(bucket).put(key, value, last_revision)
        self._link.server.changed()
        return revision
