"""The link between a transport and the in-memory server of its process."""

from __future__ import annotations

from shared.transport.base import NotConnected
from shared.transport.memory.server import MemoryServer


class MemoryLink:
    """Leads to the server until it is closed."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self.closed = False

    @property
    def server(self) -> MemoryServer:
        """The server. Raises NotConnected once closed."""
        if self.closed:
            raise NotConnected("this transport was closed: connect again")
        return self._server

    async def change(self, timeout_s: float) -> None:
        """Wait until something is written, closed or not, at most `timeout_s`."""
        await self._server.change(timeout_s)
