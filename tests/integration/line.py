"""A line to a server that can be cut: nothing that is on its way is lost, it comes later."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Line:
    """A port of this machine from which everything goes on to another one, while it is `whole`."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self.whole = asyncio.Event()
        self.whole.set()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._ways: set[asyncio.Task[None]] = set()

    async def open(self) -> Line:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for way in self._ways:
            way.cancel()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", self._to_port)
        for way in (self._carry(reader, to_there), self._carry(there, writer)):
            task = asyncio.create_task(way)
            self._ways.add(task)
            task.add_done_callback(self._ways.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self.whole.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
