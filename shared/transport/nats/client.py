"""nats-py, with fixes where a server or a foreign publisher could do harm: its parser, the headers
of messages and its TCP connection.

The parser: a hub's operator, or anybody in between if a connection is not encrypted, announces how
long a message will be before sending it, and nats-py 2.16 buffers as much as was announced. Here
announced or unterminated data cannot use up this machine's memory.

Headers: a stream accepts 64 kB of them, which are thirteen thousand lines, or bytes that no parser
accepts. Parsing that for each of a hundred messages per second would leave a reader no time for
anything else; ignoring it completely would lose who sent it. The server appends its own lines to a
stored message's headers when it delivers them (direct get, ADR-31), so of large headers only those
lines, at the end, are parsed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import nats
import nats.errors
import structlog
from nats.aio.client import DEFAULT_BUFFER_SIZE
from nats.aio.transport import TcpTransport
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser

from shared.transport.nats.credentials import NO_TLS

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
        self._aborted = True
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                # Python 3.11.2, Debian 12's own, breaks here where the server has ended TLS.
                with suppress(AttributeError):
                    writer.transport.abort()


LARGEST_MESSAGE_BYTES = 64 * 1024 * 1024
"""nats-server takes no larger `max_payload`."""
USUAL_MESSAGE_BYTES = 8 * 1024 * 1024
"""Accepted whatever this server announces, because a message may come from another server of the
cluster or behind a leaf, or may have been stored before `max_payload` was lowered. It is the limit
of our servers.
"""
HEADER_ROOM_BYTES = 64 * 1024
"""Room for what a server adds to a stored message: subject, sequence and time. The subject may be
as long as a control line.
"""
LINE_BYTES = 32 * 1024
"""Longest control line. nats-server's own limit is 4 KiB, except for the `INFO` of a large
cluster.
"""


class ServerMisbehaves(nats.errors.ProtocolError):  # type: ignore[misc]
    """The server sends what no correct server sends; the message says what."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "nats: protocol error"


def largest_message_bytes(max_payload: object) -> int:
    """The longest message to wait for, including headers. `max_payload`: as announced by the
    server.

    Raises:
        ServerMisbehaves: `max_payload` is not a size.
    """
    if not isinstance(max_payload, int) or isinstance(max_payload, bool) or max_payload < 1:
        raise ServerMisbehaves("the server's max_payload is no size in bytes")
    return min(max(max_payload, USUAL_MESSAGE_BYTES), LARGEST_MESSAGE_BYTES) + HEADER_ROOM_BYTES


class BoundedParser(Parser):  # type: ignore[misc]
    """Raises ServerMisbehaves instead of buffering without limit. `nc` is the client."""

    async def parse(self, data: bytes = b"") -> None:
        """Parse what was read, at most one buffer of the connection, and pass on what is complete.
        nats-py drops the connection after an error without reporting it, so the error is reported
        here.
        """
        try:
            try:
                await super().parse(data)
            except ServerMisbehaves:
                raise
            except (AttributeError, TypeError, ValueError, RecursionError, nats.errors.ProtocolError) as error:
                raise ServerMisbehaves(f"a line of the server cannot be read ({type(error).__name__}: {error})") from None
            self._check()
        except ServerMisbehaves as error:
            await self.nc._error_cb(error)
            raise

    def _check(self) -> None:
        """Check what is being waited for: the rest of a message or of a line."""
        if self.state != AWAITING_MSG_PAYLOAD:
            if len(self.buf) > LINE_BYTES:
                raise ServerMisbehaves(f"a line of the server goes on after {LINE_BYTES} bytes")
            return
        limit = largest_message_bytes(self.nc.max_payload)
        if self.needed > limit:
            raise ServerMisbehaves(f"the server announces a message of {self.needed} bytes; {limit} is the most it may have here")
        if self.header_needed > self.needed:
            raise ServerMisbehaves("the server announces a message whose headers are longer than the whole")


def checked_info(info: Any) -> dict[str, Any]:
    """The server's INFO, with a plausible `max_payload`. Raises ServerMisbehaves."""
    if not isinstance(info, dict):
        raise ServerMisbehaves("the server's INFO is no object")
    if "." in str(info.get("nonce", "")):
        # It is signed, and with a dot it could be the text of claims.
        raise ServerMisbehaves("the server's nonce is none")
    if "max_payload" in info:
        largest_message_bytes(info["max_payload"])
        info["max_payload"] = min(info["max_payload"], LARGEST_MESSAGE_BYTES)
    return info


MAX_HEADER_BYTES = 48 * 1024
"""Largest size of a message's headers; the reference to a blob of 4096 chunks in as many runs is
smaller.
"""
MAX_HEADER_LINES = 128
OVERSIZED_HEADER = "Swarm-Oversized-Headers"
"""Marks a message whose publisher's headers were dropped; the value is their size in bytes."""
STATUS = ("Status", "Description")
"""Where nats-py puts a status line; a publisher's headers with these names appear there too."""
_TAIL_BYTES = 1024
_FIRST_OF_SERVER = b"Nats-Subject: "


def is_oversized(block: bytes) -> bool:
    """Check whether a header block is larger than any honest publisher's."""
    return len(block) > MAX_HEADER_BYTES or block.count(b"\n") > MAX_HEADER_LINES


def is_stored(block: bytes) -> bool:
    """Check whether the server says where the message is stored."""
    return b"\r\nNats-Sequence: " in block[-_TAIL_BYTES:]


def server_lines(block: bytes) -> dict[str, str]:
    """The server's own lines at the end of a block, and the mark; without lines if the server
    appended none.
    """
    tail = block[-_TAIL_BYTES:]
    start = tail.rfind(_FIRST_OF_SERVER)
    found = {OVERSIZED_HEADER: str(len(block))}
    if start < 0:
        return found
    for line in tail[start:].split(b"\r\n"):
        name, colon, value = line.partition(b": ")
        if colon:
            found[name.decode(errors="replace")] = value.decode(errors="replace")
    return found


log = structlog.get_logger(__name__)


class Client(nats.NATS):  # type: ignore[misc]
    """nats-py with fixes for nine problems of version 2.16:

    - Its read loop ends for good when a foreign message's status line is not UTF-8.
    - It parses headers of any size.
    - It takes a publisher's `Status` header for the server's.
    - It continues without encryption if the server, or somebody in between, says that it has no
      TLS.
    - It connects to whatever other servers a server names.
    - It buffers a message or a line of any length.
    - A greeting that it cannot read ends reconnecting for good.
    - When it leaves a server, it waits until the server has taken all unsent bytes.
    - Closing can raise an error that belongs to one of its own tasks.
    """

    def __init__(self, *, demands_tls: bool, claims: Callable[[], str] | None = None) -> None:
        """`claims`: makes the user's claims, which a server with accounts in its configuration
        ignores.
        """
        super().__init__()
        self._demands_tls = demands_tls
        self._claims = claims
        self._ps = BoundedParser(self)

    @property
    def certificate_expires_at(self) -> float | None:
        """Unix time at which the server's certificate expires; None without TLS, and over
        websockets. Read from the TLS session, because nats-py does not expose it.
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
            raise nats.errors.Error(NO_TLS)
        # Ignore other servers of the cluster that the server names. The greeting comes before TLS:
        # somebody in between could add a host of his own; nats-py would check its certificate
        # against that host's own name, and give it this client's signature. Names that come within
        # TLS are checked against no configured name either, and dead addresses delay each reconnect
        # by 2 s. So a client connects only to the servers in its url, which may be a list; the
        # servers of `k8s/` announce no others (`no_advertise`).
        info.pop("connect_urls", None)
        await super()._process_info(info, initial_connection=initial_connection)

    def _connect_command(self) -> bytes:
        line: bytes = super()._connect_command()
        if self._claims is None:
            return line
        options = json.loads(line.removeprefix(b"CONNECT ")) | {"jwt": self._claims()}
        return b"CONNECT " + json.dumps(options).encode() + b"\r\n"

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except OSError:  # a certificate error is a ValueError too, but its message says what is wrong
            raise
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ServerMisbehaves(f"the server's greeting cannot be read ({type(error).__name__}: {error})") from None

    async def end(self, timeout_s: float) -> None:
        """Close, whatever state the connection is in. In 2.16, `close` waits for the same future as
        the reconnecting task; cancelling that task cancels the future. If the server went away just
        before, that raises CancelledError although nobody cancelled the caller.
        """
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
        if not block or is_oversized(block):
            return server_lines(block) if block else None
        try:
            parsed = await super()._process_headers(block)
        except (UnicodeDecodeError, IndexError) as error:
            await self._error_cb(error)
            parsed = None
        if not parsed:
            return server_lines(block) if is_stored(block) else None
        parsed.pop(OVERSIZED_HEADER, None)  # the publisher's own headers are not the server's mark
        if is_stored(block):  # the status is the publisher's; `request` would take a 503 to mean that nobody answers
            for name in STATUS:
                parsed.pop(name, None)
        return parsed
