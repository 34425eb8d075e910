"""An in-memory server's streams and buckets, for all transports of a process. Time is an argument,
so that tests can advance it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace

from shared.transport.base import Lowering, NoStream, NotConnected, StreamSpec, WouldLower, lowered
from shared.transport.memory.bucket import MemoryBucket
from shared.transport.memory.stream import MemoryStream

_PROTECTIONS = ("replicas", "max_msgs", "max_bytes", "max_age_s", "max_msgs_per_subject", "max_msg_bytes")


class MemoryServer:
    """Streams and buckets that several `MemoryTransport`s of one process share."""

    def __init__(self, *, max_payload_bytes: int = 1024 * 1024, now: Callable[[], float] = time.time) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.now = now
        self.streams: dict[str, MemoryStream] = {}
        self.buckets: dict[str, MemoryBucket] = {}
        self._waiting: set[asyncio.Event] = set()

    def ensure_stream(self, spec: StreamSpec, lowering: Lowering = Lowering.APPLY) -> None:
        """Create or update a stream. Raises WouldLower like the NATS transport."""
        if spec.name in self.streams:
            stream = self.streams[spec.name]
            wanted = spec if lowering is Lowering.APPLY else _not_lower(spec, stream.spec, lowering)
            if lowering is not Lowering.LOOK:
                stream.update(wanted)
        elif lowering is not Lowering.LOOK:
            self.streams[spec.name] = MemoryStream(spec, self.now)

    def stream(self, name: str) -> MemoryStream:
        """The stream `name`. Raises NoStream if it does not exist, like a server on which no
        stream answers.
        """
        if name not in self.streams:
            raise NoStream(f"stream {name}: no stream answers: call ensure_stream first")
        return self.streams[name]

    def bucket(self, name: str) -> MemoryBucket:
        """The bucket `name`. Raises NotConnected if it does not exist, like a server on which no
        stream answers.
        """
        if name not in self.buckets:
            raise NotConnected(f"bucket {name}: no stream answers: call kv.ensure first")
        return self.buckets[name]

    def changed(self) -> None:
        """Wake all that wait for a change."""
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


def _not_lower(wanted: StreamSpec, actual: StreamSpec, lowering: Lowering) -> StreamSpec:
    """`wanted`, with those settings of `actual` that are higher. Raises WouldLower if `lowering`
    refuses it.
    """
    new, old = asdict(wanted), asdict(actual)
    higher = lowered(new, old, _PROTECTIONS)
    if higher and lowering in (Lowering.REFUSE, Lowering.LOOK):
        raise WouldLower(wanted.name, new, old, higher)
    return replace(wanted, **{name: old[name] for name in higher})
