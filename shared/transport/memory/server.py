"""An in-memory server's streams and buckets, for all transports of a process. Time is an argument,
so that a test can move it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from shared.transport.base import NotConnected, StreamSpec
from shared.transport.memory.bucket import MemoryBucket
from shared.transport.memory.stream import MemoryStream


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
            raise NotConnected(f"bucket {name}: no stream answers: call kv.ensure first")
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
