"""nats-py's TCP connection, whose end does not depend on the other side."""

from __future__ import annotations

import asyncio
from typing import Any

from nats.aio.transport import TcpTransport

CLOSING_S = 1.0
"""How long what is unsent may still be sent, and the end of TLS be acknowledged."""


class PromptTransport(TcpTransport):  # type: ignore[misc]
    """nats-py's `wait_closed` has no limit: a server that takes nothing more keeps it as long as
    there are unsent bytes, and after a failed TLS handshake nothing ends it, because asyncio took
    the connection from the object that it waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._aborted = False

    async def connect_tls(self, *args: Any, **kwargs: Any) -> None:
        """Turn the connection to TLS; there is none any more where that fails."""
        try:
            await super().connect_tls(*args, **kwargs)
        except BaseException:
            self.abort()
            raise

    async def wait_closed(self) -> None:
        """Wait for the end after `close`, which comes within `CLOSING_S`."""
        if self._aborted:
            return
        try:
            async with asyncio.timeout(CLOSING_S):
                await super().wait_closed()
        except TimeoutError:
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """End the connection now, with what is unsent."""
        self._aborted = True
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()
