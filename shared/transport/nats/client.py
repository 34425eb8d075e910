"""nats-py, with fixes where a server or a foreign publisher could do harm."""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import suppress
from typing import Any

import nats
import nats.errors
import structlog
from nats.aio.client import DEFAULT_BUFFER_SIZE

from shared.transport.nats import credentials, headers
from shared.transport.nats.parser import BoundedParser, ServerMisbehaves, checked_info
from shared.transport.nats.tcp import PromptTransport

log = structlog.get_logger(__name__)


class Client(nats.NATS):  # type: ignore[misc]
    """nats-py, but for nine things in 2.16: its read loop ends for good when a foreign message's
    status line is not UTF-8, it parses headers of any size, it takes a publisher's `Status` for
    the server's, it goes on in the clear when a server, or somebody between, says that it has no
    TLS, it goes to whatever other servers that one names, it waits for a message or a line of any
    length, a greeting that it cannot read ends its reconnecting for good, it waits for a server
    that it leaves to take what is unsent, and closing can raise what belongs to a task of its
    own."""

    def __init__(self, *, demands_tls: bool) -> None:
        super().__init__()
        self._demands_tls = demands_tls
        self._ps = BoundedParser(self)

    @property
    def certificate_expires_at(self) -> float | None:
        """Unix time at which the server's certificate runs out. nats-py shows no part of the TLS
        session; None where there is none, and over websockets.
        """
        writer = getattr(self._transport, "_io_writer", None)
        session = writer.get_extra_info("ssl_object") if writer is not None else None
        ends = (session.getpeercert() or {}).get("notAfter") if session is not None else None
        return float(ssl.cert_time_to_seconds(ends)) if ends else None

    @property
    def server(self) -> tuple[str, str]:
        """Name and version of the server that this connection is to, as it says itself."""
        return str(self._server_info.get("server_name", "")), str(self._server_info.get("version", ""))

    @property
    def tried(self) -> str:
        """The address that was tried last, as it was given; empty before the first."""
        return str(self._current_server.uri.geturl()) if self._current_server is not None else ""

    async def _connect_to_server(self, s: Any) -> None:
        s.last_attempt = time.monotonic()
        self._abort()
        self._transport = PromptTransport()
        await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def _process_info(self, info: Any, initial_connection: bool = False) -> None:
        info = checked_info(info)
        if initial_connection and self._demands_tls and not info.get("tls_required"):
            raise nats.errors.Error(credentials.NO_TLS)
        # Other servers of the cluster. The greeting comes before TLS: somebody between adds a host
        # of his own, nats-py checks its certificate against that host's own name, and it is handed
        # this client's signature. Names that come within TLS are checked against no configured
        # name either, and dead addresses delay each reconnect by 2 s. So a client goes only where
        # its url says, which may be a list; the servers of `k8s/` name no others (`no_advertise`).
        info.pop("connect_urls", None)
        await super()._process_info(info, initial_connection=initial_connection)

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except OSError:  # a certificate that does not verify is a ValueError too, and says itself what is wrong
            raise
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ServerMisbehaves(f"the server's greeting cannot be read ({type(error).__name__}: {error})") from None

    async def end(self, timeout_s: float) -> None:
        """Close, whatever state the connection is in. `close` of 2.16 waits for the same future as
        the reconnecting task that it cancels, and with it the future: where the server went away
        just before, that raises CancelledError though nobody cancelled the caller."""
        with suppress(asyncio.CancelledError):
            try:
                async with asyncio.timeout(timeout_s):
                    await self.close()
            except Exception as error:
                log.debug("nats_close_failed", error=repr(error))
            finally:
                self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _process_headers(self, block: Any) -> Any:
        if not block or headers.is_oversized(block):
            return headers.server_lines(block) if block else None
        try:
            parsed = await super()._process_headers(block)
        except (UnicodeDecodeError, IndexError) as error:
            await self._error_cb(error)
            parsed = None
        if not parsed:
            return headers.server_lines(block) if headers.is_stored(block) else None
        parsed.pop(headers.OVERSIZED_HEADER, None)  # a publisher's own is no mark
        if headers.is_stored(block):  # the status is its publisher's then; `request` would take 503 for nobody there
            for name in headers.STATUS:
                parsed.pop(name, None)
        return parsed
