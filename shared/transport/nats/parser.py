"""nats-py's parser with bounds: what a server announces, or leaves without an end, is not waited
for with all of this machine's memory.

A hub's operator, or anybody between where a connection is not encrypted, says how long a message
will be before it sends it, and nats-py 2.16 gathers as much as was said.
"""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser

LARGEST_MESSAGE_BYTES = 64 * 1024 * 1024
"""nats-server takes no larger `max_payload`."""
USUAL_MESSAGE_BYTES = 8 * 1024 * 1024
"""Taken whatever this server announces: a message may come from another server of the cluster or
behind a leaf, or be stored from before `max_payload` was lowered. It is what our servers take."""
HEADER_ROOM_BYTES = 64 * 1024
"""What a server may add to a message that it has stored: subject, sequence and time, and the
subject of a message has as much room as a control line."""
LINE_BYTES = 32 * 1024
"""Of a control line; nats-server's own limit is 4 KiB, but for the `INFO` of a large cluster."""


class ServerMisbehaves(nats.errors.ProtocolError):  # type: ignore[misc]
    """The server sends what no server of ours sends; the message says what."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "nats: protocol error"


def largest_message_bytes(max_payload: object) -> int:
    """The longest message to wait for, headers included. `max_payload`: what the server announced.

    Raises:
        ServerMisbehaves: that is no size.
    """
    if not isinstance(max_payload, int) or isinstance(max_payload, bool) or max_payload < 1:
        raise ServerMisbehaves("the server's max_payload is no size in bytes")
    return min(max(max_payload, USUAL_MESSAGE_BYTES), LARGEST_MESSAGE_BYTES) + HEADER_ROOM_BYTES


class BoundedParser(Parser):  # type: ignore[misc]
    """Raises ServerMisbehaves instead of gathering without end. `nc` is the client."""

    async def parse(self, data: bytes = b"") -> None:
        """Take in what was read, one buffer of the connection at most, and pass on what is
        complete. nats-py drops the connection after an error, without a word; so it is told here.
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
        """What is waited for now: the rest of a message or of a line."""
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
    """What a server says of itself, with a `max_payload` that may be believed. Raises
    ServerMisbehaves.
    """
    if not isinstance(info, dict):
        raise ServerMisbehaves("the server's INFO is no object")
    if "max_payload" in info:
        largest_message_bytes(info["max_payload"])
        info["max_payload"] = min(info["max_payload"], LARGEST_MESSAGE_BYTES)
    return info
