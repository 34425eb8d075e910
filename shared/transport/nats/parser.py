"""nats-py's parser with limits, so that announced or unterminated data cannot use up this machine's
memory.

A hub's operator, or anybody in between if a connection is not encrypted, announces how long a
message will be before sending it, and nats-py 2.16 buffers as much as was announced.
"""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser

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
    if "max_payload" in info:
        largest_message_bytes(info["max_payload"])
        info["max_payload"] = min(info["max_payload"], LARGEST_MESSAGE_BYTES)
    return info
