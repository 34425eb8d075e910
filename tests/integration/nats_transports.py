"""Transports to a real server and what may stand between or be asked past them: raw requests, raw
headers, a line on which replies are lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress

import nats

from shared.cancelling import cancel_and_wait
from shared.transport.base import ConsumerSpec, Retention, StreamSpec, Transport
from shared.transport.connect import connect
from tests.nats_server import NatsServer, free_port

QUEUE = StreamSpec(name="QUEUE", subjects=("queue",), retention=Retention.WORK_QUEUE)
LOG = StreamSpec(name="LOG", subjects=("log.>",))
WORKER = ConsumerSpec(name="worker", ack_wait_s=1.0, max_deliver=10, max_ack_pending=100)
MakeServer = Callable[..., NatsServer]


@asynccontextmanager
async def opened(url: str):
    transport = await connect(url, name="test", timeout_s=5.0)
    try:
        yield transport
    finally:
        await transport.close()


async def asked(server: NatsServer, subject: str, request: object = None) -> dict:
    """One raw request of the JetStream API, past the code under test."""
    client = await nats.connect(server.url)
    try:
        body = b"" if request is None else json.dumps(request).encode()
        return json.loads((await client.request(f"$JS.API.{subject}", body, timeout=5)).data)
    finally:
        await client.close()


async def sent_raw(server: NatsServer, subject: str, block: bytes, times: int = 1) -> None:
    """Publish messages with exactly these bytes as headers, which no client library would let
    out.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b'CONNECT {"headers":true,"verbose":false}\r\n')
    for _ in range(times):
        writer.write(b"HPUB %b %d %d\r\n%b\r\n" % (subject.encode(), len(block), len(block), block))
    writer.write(b"PING\r\n")
    while b"PONG" not in await reader.readline():
        pass
    writer.close()


async def published(transport: Transport, payload: bytes, message_id: str, timeout_s: float = 15.0):
    return await transport.publish("queue", payload, stream="QUEUE", message_id=message_id, timeout_s=timeout_s)


class LossyProxy:
    """Stands between client and server; while `lose_replies` is set, what the server says does not
    arrive.
    """

    def __init__(self, port: int) -> None:
        self.port = free_port()
        self.lose_replies = False
        self._to = port
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LossyProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await cancel_and_wait(*self._pumps)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._to)
        for source, sink, replies in ((reader, upstream_writer, False), (upstream_reader, writer, True)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink, replies)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, replies: bool) -> None:
        with suppress(OSError):
            while read := await source.read(65536):
                if not (replies and self.lose_replies):
                    sink.write(read)
                    await sink.drain()
            sink.close()
