"""A message delivered by the in-memory transport."""

from __future__ import annotations

from shared.transport import blobs
from shared.transport.base import Retention, StoredMessage
from shared.transport.memory.chunks import MemoryChunks
from shared.transport.memory.link import MemoryLink
from shared.transport.memory.stream import MemoryStream


class MemoryDelivery:
    """See `base.Delivery`."""

    def __init__(self, chunks: MemoryChunks, link: MemoryLink, consumer: str, message: StoredMessage, deliveries: int) -> None:
        self._chunks = chunks
        self._link = link
        self._consumer = consumer
        self._message = message
        self._deliveries = deliveries
        self._settled = False

    @property
    def message(self) -> StoredMessage:
        """The message."""
        return self._message

    @property
    def deliveries(self) -> int:
        """How many times it was delivered, including this time."""
        return self._deliveries

    async def ack(self) -> None:
        """Acknowledge."""
        if not self._settled:
            self._settled = True
            stream = self._stream()
            stream.settle(self._consumer, self._message.seq)
            if stream.spec.retention is Retention.WORK_QUEUE:
                await blobs.drop_of(self._chunks, self._message)

    async def nak(self, delay_s: float = 0.0) -> None:
        """Return the message to the queue."""
        if not self._settled:
            self._settled = True
            self._stream().consumer(self._consumer).due_in(self._message.seq, delay_s)
            self._link.server.changed()

    async def in_progress(self) -> None:
        """Restart the acknowledgement clock."""
        if not self._settled:
            self._stream().consumer(self._consumer).restart_clock(self._message.seq)

    def _stream(self) -> MemoryStream:
        return self._link.server.stream(self._message.stream)
