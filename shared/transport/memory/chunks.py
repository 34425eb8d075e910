"""Chunks of large payloads, in the companion streams of the in-memory server."""

from __future__ import annotations

import uuid

from shared.transport import blobs
from shared.transport.base import StoredMessage
from shared.transport.memory.link import MemoryLink


class MemoryChunks:
    """The chunks of large payloads (see `blobs.ChunkStore`)."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link

    async def put_chunk(self, subject: str, chunk: bytes, *, stream: str, timeout_s: float) -> int:
        """Store one chunk."""
        target = self._link.server.stream(stream)
        target.check(subject, len(chunk))
        return target.store(subject, chunk, {"Nats-Msg-Id": uuid.uuid4().hex}, None).seq

    async def read(
        self, stream: str, start_seq: int, max_messages: int, timeout_s: float, *, max_bytes: int
    ) -> list[StoredMessage]:
        """Chunks in order, ending with the one that reaches `max_bytes`."""
        return self._link.server.stream(stream).read(start_seq, max_messages, max_bytes)

    async def drop(self, stream: str, seq: int) -> None:
        """Delete one chunk."""
        self._link.server.stream(stream).delete(seq)

    def sweep(self, stream: str) -> None:
        """Purge chunks that are older than any message of `stream` that could refer to them."""
        server = self._link.server
        oldest = server.stream(stream).read(1, 1)
        before = blobs.sweep_before(oldest[0].stored_at if oldest else None, server.now())
        companion = server.stream(blobs.companion_name(stream))
        stale = [chunk.seq for chunk in companion.read(1, companion.state().messages) if chunk.stored_at < before]
        if stale:
            companion.purge(stale[-1])
