"""The rules of key-value buckets as plain state, for the in-memory server."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.transport.base import Conflict, KvEntry, TooLarge


class MemoryBucket:
    """One key-value bucket. Revisions count the writes to the whole bucket, as on a real server."""

    def __init__(self, ttl_s: float, now: Callable[[], float], max_value_bytes: int = 0) -> None:
        self.ttl_s, self.max_value_bytes = ttl_s, max_value_bytes
        self._now = now
        self._newest: dict[str, tuple[KvEntry, float]] = {}
        self._revision = 0

    def put(self, key: str, value: bytes, last_revision: int | None) -> int:
        """Write; with `last_revision`, only if it is the newest revision. Raises TooLarge."""
        if 0 < self.max_value_bytes < len(value):
            raise TooLarge(f"key {key}: values up to {self.max_value_bytes} bytes, this one has {len(value)}")
        current = self.get(key)
        revision = 0 if current is None else current.revision
        if last_revision is not None and last_revision != revision:
            raise Conflict(f"key {key}: its newest revision is {revision}, not {last_revision}: read it and decide again")
        self._revision += 1
        self._newest[key] = (KvEntry(key, value, self._revision, time.time()), self._now())
        return self._revision

    def get(self, key: str) -> KvEntry | None:
        """Newest value."""
        entry, written_at = self._newest.get(key, (None, 0.0))
        return None if entry is None or 0 < self.ttl_s <= self._now() - written_at else entry

    def all(self, prefix: str) -> list[KvEntry]:
        """Newest values of the keys that start with `prefix`."""
        found = (self.get(key) for key in sorted(self._newest) if key.startswith(prefix))
        return [entry for entry in found if entry is not None]
