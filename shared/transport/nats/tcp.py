"""nats-py's TCP connection, which can be closed without the other side's cooperation."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from nats.aio.transport import TcpTransport

CLOSING_S = 1.0
"""How long unsent bytes may still be sent and the end of TLS be acknowledged."""


class PromptTransport(TcpTransport):  # type: ignore[misc]
    """Closes within a limit. nats-py's `wait_closed` has none: a server that accepts nothing more
    holds it as long as there are unsent bytes, and after a failed TLS handshake nothing ends it,
    because asyncio took the connection from the object that it waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._aborted = False

    async def connect_tls(self, *args: Any, **kwargs: Any) -> None:
        """Switch the connection to TLS. If that fails, the connection is gone."""
        try:
            await super().connect_tls(*args, **kwargs)
        except BaseException:
            self.abort()
            raise

    async def wait_closed(self) -> None:
        """Wait for the connection to close after `close`, at most `CLOSING_S`."""
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
        """End the connection now and drop unsent bytes."""
        self._aborted = True
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                # Python 3.11.2, Debian 12's own, breaks here where the server has ended TLS.
                with suppress(AttributeError):
                    writer.transport.abort()
