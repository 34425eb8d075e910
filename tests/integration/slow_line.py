"""A line to a server that carries few bytes a second towards the client, and counts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_AT_ONCE = 64 * 1024


class SlowLine:
    """What the line has carried so far."""

    def __init__(self, host: str, port: int, bytes_per_s: float) -> None:
        self._host, self._port, self._bytes_per_s = host, port, bytes_per_s
        self.received_bytes = 0
        self.url = ""
        self._free_s = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        from_server, to_server = await asyncio.open_connection(self._host, self._port, limit=_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._copy(reader, to_server, slow=False))
                both.create_task(self._copy(from_server, writer, slow=True))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            to_server.close()
            writer.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, slow: bool) -> None:
        clock = asyncio.get_running_loop().time
        while data := await source.read(_AT_ONCE):
            if slow:
                self.received_bytes += len(data)
                self._free_s = max(self._free_s, clock()) + len(data) / self._bytes_per_s
                await asyncio.sleep(max(0.0, self._free_s - clock()))
            target.write(data)
            await target.drain()
        raise OSError("the other side has closed")


@asynccontextmanager
async def slow_line(port: int, bytes_per_s: float) -> AsyncIterator[SlowLine]:
    """A slow line to a server of this machine; its `url` is for clients."""
    line = SlowLine("127.0.0.1", port, bytes_per_s)
    server = await asyncio.start_server(line.carry, "127.0.0.1", 0, limit=_AT_ONCE)
    line.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
