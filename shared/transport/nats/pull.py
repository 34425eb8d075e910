"""Takes work from a durable pull consumer.

Each pull is short and combines `no_wait` with `expires`: the server waits for the first message,
then delivers what is available and ends the pull, so that no pull is left behind to swallow a later
message. nats-py's own `fetch` waits for a full batch and can stall on a pull orphaned by a
reconnect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import nats.errors
import structlog

from shared.transport.base import Deadline, NotConnected, StoredMessage, Transport, TransportError
from shared.transport.nats.answers import count_of, readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.direct import stored_message
from shared.transport.nats.jetstream_api import NANOSECONDS
from shared.transport.nats.transport import NatsTransport

log = structlog.get_logger(__name__)

LONGEST_FETCH_S = 5.0
"""`fetch` never waits longer, whatever its `timeout_s`."""
ACK_TIMEOUT_S = 5.0
_SLICE_S = 0.25


class Delivery:
    """A message delivered to one reader of a work queue; `deliveries` counts this one too. Only the
    first call of `ack` or `nak` has an effect.
    """

    def __init__(
        self,
        connection: Connection,
        message: StoredMessage,
        deliveries: int,
        reply: str,
        on_settled: Callable[[StoredMessage], None],
    ) -> None:
        self._connection = connection
        self.message = message
        self.deliveries = deliveries
        self._reply = reply
        self._on_settled = on_settled
        self._settled = False

    async def ack(self) -> None:
        """Acknowledge, confirmed by the server. Without a confirmation in time this is logged, and
        the message will be delivered again.
        """
        if await self._settle(b"+ACK"):
            self._on_settled(self.message)

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._settle(b"-NAK" if delay_s <= 0 else b'-NAK {"delay": %d}' % round(delay_s * NANOSECONDS))

    async def in_progress(self) -> None:
        if not self._settled:
            await self._connection.send(self._reply, b"+WPI")

    async def _settle(self, verdict: bytes) -> bool:
        if self._settled:
            return False
        self._settled = True
        try:
            await self._connection.request(self._reply, verdict, Deadline(ACK_TIMEOUT_S), what=f"{verdict[:4].decode()}")
        except NotConnected as error:
            log.warning(
                "ack_not_confirmed", stream=self.message.stream, seq=self.message.seq, error=str(error), effect="redelivery"
            )
            return False
        return True


async def fetch(plane: Transport, stream: str, consumer: str, max_messages: int, timeout_s: float) -> list[Delivery]:
    """Up to `max_messages` from a durable consumer. Empty if none arrive within `timeout_s`
    (`LONGEST_FETCH_S` at most).

    Raises:
        NotConnected: the consumer does not exist, or the plane's fence forbids it.
        TransportError: a delivery cannot be read.
    """
    assert isinstance(plane, NatsTransport)
    await plane.writable()
    connection, on_settled = plane.connection, plane.chunks.settled
    deadline = Deadline(min(timeout_s, LONGEST_FETCH_S))
    missing = False
    while not deadline.passed and await connection.until_connected(deadline):
        try:
            found, missing = await _pull(connection, stream, consumer, max_messages, deadline, on_settled)
        except nats.errors.Error:
            found, missing = [], True
        if found:
            return found
        # A server that has no message waits until one comes, or for the deadline; what ends a pull
        # earlier would end the next one as well.
        await asyncio.sleep(min(0.1, deadline.left_s))
    if missing and connection.connected:
        raise NotConnected(
            f"consumer {consumer} of stream {stream} at {connection.options.url}: nobody answers: "
            "call ensure_stream and ensure_consumer first, or wait until JetStream has started"
        )
    return []


async def _pull(
    connection: Connection,
    stream: str,
    consumer: str,
    max_messages: int,
    deadline: Deadline,
    on_settled: Callable[[StoredMessage], None],
) -> tuple[list[Delivery], bool]:
    """One pull: its deliveries, and whether the consumer was missing."""
    epoch, found, replies = connection.epoch, list[Delivery](), asyncio.Queue[Any]()
    request = {"batch": max_messages, "no_wait": True, "expires": max(1, round(deadline.left_s * NANOSECONDS))}
    try:
        async with connection.replies(
            f"{connection.options.api_prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}", json.dumps(request).encode()
        ) as replies:
            while len(found) < max_messages:
                # Wait beyond the deadline: the server ends the pull, and what it sent at the last
                # moment is still received.
                wait_s = _SLICE_S if found else min(_SLICE_S, deadline.left_s + 0.1)
                try:
                    async with asyncio.timeout(wait_s):
                        reply = await replies.get()
                except TimeoutError:
                    if not replies.empty():
                        continue
                    if found or deadline.passed or connection.epoch != epoch or not connection.connected:
                        break
                    continue
                delivery = _delivery(connection, stream, reply, on_settled)
                if delivery is None:
                    status = (reply.headers or {}).get("Status")
                    if status == "409":  # "Consumer Deleted", "Leadership Change", "Server Shutdown": the next pull will show
                        await asyncio.sleep(min(0.1, deadline.left_s))
                    return found, not found and status == "503"
                found.append(delivery)
    except asyncio.CancelledError:
        while not replies.empty():
            with suppress(TransportError):
                if (delivery := _delivery(connection, stream, replies.get_nowait(), on_settled)) is not None:
                    found.append(delivery)
        for delivery in found:
            await connection.send(delivery._reply, b"-NAK")
        raise
    return found, False


def _delivery(connection: Connection, stream: str, reply: Any, on_settled: Callable[[StoredMessage], None]) -> Delivery | None:
    """The delivery in a reply, or None for a status. The acknowledgement subject contains the
    numbers, in two formats (ADR-15). Raises TransportError if it does not.
    """
    tokens = reply.reply.split(".")
    if tokens[:2] != ["$JS", "ACK"]:
        return None
    at = 4 if len(tokens) == 9 else 6
    with readable(f"delivery from stream {stream}"):
        deliveries, seq, _, stored_ns = (count_of(int(token)) for token in tokens[at : at + 4])
    message = stored_message(stream, reply.subject, seq, stored_ns / NANOSECONDS, bytes(reply.data), reply.headers or {})
    return Delivery(connection, message, deliveries, reply.reply, on_settled)
