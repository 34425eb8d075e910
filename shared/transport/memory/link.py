"""The link between a transport and the in-memory server of its process."""

from __future__ import annotations

from shared.transport.base import NotConnected
from shared.transport.memory.server import MemoryServer


class MemoryLink:
    """Gives access to the server until it is closed."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self.closed = False

    @property
    def server(self) -> MemoryServer:
        """The server. Raises NotConnected after `close`."""
        if self.closed:
            raise NotConnected("this transport was closed: connect again")
        return self._server

    async def change(self, timeout_s: float) -> None:
        """Wait until something is written, at most `timeout_s`. Works even when closed."""
        await self._server.change(timeout_s)
