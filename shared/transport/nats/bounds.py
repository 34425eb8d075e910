"""The limits of a stream that a publisher must know before it stores a message, refreshed once a
minute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from shared.transport import blobs
from shared.transport.base import Retention, TransportError
from shared.transport.deadline import Deadline
from shared.transport.nats import jetstream_api as api
from shared.transport.nats.answers import readable
from shared.transport.nats.connection import Connection

_ASKED_AGAIN_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest payload that a stream accepts (-1: any), and whether messages are deleted once they
    are acknowledged.
    """

    max_msg_bytes: int
    work_queue: bool
    read_at: float


class StreamBounds:
    """The limits of the streams that this process publishes to."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[str, Bounds] = {}

    def forget(self, stream: str) -> None:
        """Discard the cached limits, because the stream's settings were changed."""
        self._known.pop(stream, None)

    async def of(self, stream: str) -> Bounds:
        """The stream's limits. No limits if the server does not report them, or this user may not
        ask for them; the server then decides about the message itself.
        """
        if not self._connection.options.may_ask:
            return Bounds(-1, False, 0.0)
        known = self._known.get(stream)
        now = time.monotonic()
        if known is not None and now - known.read_at < _ASKED_AGAIN_AFTER_S:
            return known
        what = f"stream {stream}"
        try:
            answer = await api.call(self._connection, f"STREAM.INFO.{stream}", None, Deadline(1.0), what)
            with readable(what):
                size = int(answer["config"].get("max_msg_size", -1))
                work_queue = answer["config"]["retention"] == Retention.WORK_QUEUE.value
        except TransportError:
            if known is not None or not self._connection.connected:
                return known or Bounds(-1, False, now)
            bounds = Bounds(-1, False, now)
        else:
            bounds = Bounds(size - blobs.HEADER_ROOM_BYTES if size >= blobs.HEADER_ROOM_BYTES else size, work_queue, now)
        self._known[stream] = bounds
        return bounds
