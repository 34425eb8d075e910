"""Large payloads on a NATS server: stores their chunks in the companion streams, and deletes them
with their message.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any

from shared.transport import blobs
from shared.transport.base import StoredMessage, StreamMissing
from shared.transport.deadline import Deadline
from shared.transport.nats import direct, storing
from shared.transport.nats import jetstream_api as api
from shared.transport.nats.bounds import StreamBounds
from shared.transport.nats.connection import Connection


class NatsChunks:
    """The chunks of a server's streams (see `blobs.ChunkStore`). Deletions run in background
    tasks.
    """

    def __init__(self, connection: Connection, bounds: StreamBounds) -> None:
        self._connection = connection
        self._bounds = bounds
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for the background tasks, at most 2 seconds."""
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)

    async def put_chunk(self, subject: str, chunk: bytes, *, stream: str, timeout_s: float) -> int:
        """Store one chunk. Its message id is random, so that a foreign publisher cannot use it
        first.
        """
        headers = {"Nats-Msg-Id": uuid.uuid4().hex}
        return (await storing.store(self._connection, subject, chunk, stream, headers, Deadline(timeout_s))).seq

    async def read(
        self, stream: str, start_seq: int, max_messages: int, timeout_s: float, *, max_bytes: int
    ) -> list[StoredMessage]:
        """Chunks in order, ending with the one that reaches `max_bytes`, or at the deadline."""
        bound = min(max_bytes, direct.READ_BYTES)
        return await direct.read(self._connection, stream, start_seq, max_messages, Deadline(timeout_s), bound)

    async def drop(self, stream: str, seq: int) -> None:
        """Delete one chunk. A missing one is not an error."""
        await api.delete_message(self._connection, stream, seq)

    def drop_later(self, stream: str, chunks: Sequence[int]) -> None:
        """Delete chunks of messages in `stream`, in the background."""
        self._later(blobs.drop(self, stream, chunks))

    def settled(self, message: StoredMessage) -> None:
        """A reader has finished with the message. In a work queue this deletes it, so its chunks
        are deleted too, in the background.
        """
        if message.inline is None:
            self._later(self._drop_settled(message))

    async def sweep(self, stream: str) -> None:
        """Purge chunks that are older than any message of `stream` that could refer to them."""
        oldest = await direct.read(self._connection, stream, 1, 1, Deadline(api.READ_TIMEOUT_S))
        before = datetime.fromtimestamp(blobs.sweep_before(oldest[0].stored_at if oldest else None, time.time()), UTC)
        name = blobs.companion_name(stream)
        request = {"start_time": before.isoformat(), "batch": 1}
        kept = await direct.batch(self._connection, name, request, Deadline(api.READ_TIMEOUT_S))
        first_kept = kept.messages[0].seq if kept.messages else (await api.stream_state(self._connection, name)).last_seq + 1
        if first_kept > 1:
            await api.purge(self._connection, name, first_kept)

    async def sweep_if_any(self, stream: str) -> None:
        """`sweep` where the stream has a companion."""
        try:
            await api.stream_state(self._connection, blobs.companion_name(stream))
        except (api.ApiError, StreamMissing):
            return
        await self.sweep(stream)

    async def _drop_settled(self, message: StoredMessage) -> None:
        if (await self._bounds.of(message.stream)).work_queue:
            await blobs.drop_of(self, message)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
