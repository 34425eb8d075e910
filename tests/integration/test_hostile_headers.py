"""Headers as large as a stream takes, in bytes and lines that cost a parser time: who sends them,
and what they cost others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.identity.keys import SigningKey, new_seed
from shared.transport.blobs import UNKNOWN_SIZE
from shared.transport.connect import connect
from shared.transport.nats import client
from tests.integration.nats_transports import LOG, opened
from tests.integration.running_verifier import configured, until, verifier
from tests.integration.test_verifier_trust import share
from tests.long_forms import FULL
from tests.nats_server import NatsServer

MakeServer = Callable[..., NatsServer]
LARGE = 65_000
"""A stream refuses headers of 64 kB and more."""
LINE = b"a:b\r\n"
BLOCKS = {
    "thousands of lines": b"NATS/1.0\r\n" + LINE * (LARGE // len(LINE)) + b"\r\n",
    "binary garbage": b"NATS/1.0\r\n" + bytes(range(128, 256)) * (LARGE // 128) + b"\r\n\r\n",
    "one long line": b"NATS/1.0\r\nX: " + b"x" * LARGE + b"\r\n\r\n",
    "a status line of garbage": b"NATS/1.0 " + b"\xff" * LARGE + b"\r\n\r\n",
    "forged places": b"NATS/1.0\r\n" + b"Nats-Subject: log.b\r\nNats-Sequence: 1\r\n" * (LARGE // 42) + b"\r\n",
    "the status of nobody there": b"NATS/1.0 503\r\n\r\n",
    "the same as a header": b"NATS/1.0\r\nStatus: 503\r\nDescription: none\r\n\r\n",
    "a status that ends a batch": b"NATS/1.0\r\nStatus: 204\r\nNats-Num-Pending: 0\r\n\r\n",
    "the reader's own mark": b"NATS/1.0\r\n%s: 999999999\r\n\r\n" % client.OVERSIZED_HEADER.encode(),
}


HONEST = 12 if FULL else 6
FLOOD = 75 * HONEST
"""As many as are sent in the time of the honest groups."""


async def published(server: NatsServer, subject: str, block: bytes, times: int, pause_s: float = 0.0) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    for _ in range(times):
        writer.write(b"HPUB %s %d %d\r\n" % (subject.encode(), len(block), len(block)) + block + b"\r\n")
        await writer.drain()
        await asyncio.sleep(pause_s)
    writer.write(b"PING\r\n")
    await writer.drain()
    async with asyncio.timeout(120):
        while b"PONG" not in await reader.readline():
            pass
    writer.close()


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
async def test_a_message_with_hostile_headers_keeps_its_place_and_its_sender_and_nothing_else(
    nats_server: MakeServer, block: bytes
) -> None:
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.ensure_stream(LOG)
        await transport.publish("log.a", b"before", stream="LOG", message_id="1")
        await published(server, "log.evil", block, times=3)
        await transport.publish("log.a", b"after", stream="LOG", message_id="2")
        messages = await transport.read("LOG", 1, 10, timeout_s=20.0)
        assert [(message.seq, message.subject) for message in messages] == [
            (1, "log.a"),
            *((seq, "log.evil") for seq in (2, 3, 4)),
            (5, "log.a"),
        ]
        hostile = await transport.get("LOG", 3)
        newest = await transport.last("LOG", "log.evil")
        assert newest is not None and newest.seq == 4
        assert hostile is not None
        if len(block) > client.MAX_HEADER_BYTES and not block.startswith(b"NATS/1.0 "):  # of a status the server keeps nothing
            assert (hostile.inline, hostile.size_bytes) == (None, UNKNOWN_SIZE)
            assert sum(map(len, hostile.headers.values())) < 100
        else:
            assert hostile.inline == b"", "what the publisher wrote is no mark"
            assert client.OVERSIZED_HEADER not in hostile.headers


async def test_large_headers_of_one_sender_cost_the_others_nothing_and_are_counted_under_him(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    """150 messages a second of 13,000 header lines each, beside 2 honest groups a second."""
    server = nats_server()
    config = configured("alpha", server.url, tmp_path)
    key = SigningKey(new_seed())
    async with verifier(config) as alpha:
        honest = await connect(server.url, name="honest")
        flood = asyncio.create_task(
            published(server, subjects.rollouts("mallory"), BLOCKS["thousands of lines"], times=FLOOD, pause_s=1 / 150)
        )
        for index in range(HONEST):
            await share(honest, key, "beta", index)
            await asyncio.sleep(0.5)
        await flood
        sent_at = time.monotonic()
        await until(lambda: alpha.status.get("accepted") == HONEST, 120)
        await until(lambda: alpha.status.get("refused_too_large") == FLOOD, 120)
        print(f"all honest groups taken in {time.monotonic() - sent_at:.1f} s after the last was sent")
        await honest.close()


async def test_a_status_that_a_member_writes_keeps_no_draw_from_a_full_stream(nats_server: MakeServer, tmp_path: Path) -> None:
    """300 small messages a second, where alpha looks at 16, so that it draws; each says 503."""
    server = nats_server()
    config = configured("alpha", server.url, tmp_path, intake_groups_per_s=2.0)
    key, sent = SigningKey(new_seed()), 60
    async with verifier(config) as alpha:
        honest = await connect(server.url, name="honest")
        for index in range(3):
            await share(honest, key, "beta", index)
        await until(lambda: alpha.status.get("accepted") == 3, 120)
        flood = asyncio.create_task(
            published(server, subjects.rollouts("mallory"), BLOCKS["the same as a header"], times=20_000, pause_s=1 / 300)
        )
        for index in range(3, sent):
            await share(honest, key, "beta", index)
            await asyncio.sleep(0.25)
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        print(f"{alpha.status.get('accepted')} of {sent} honest groups taken")
        assert alpha.status.get("accepted") >= 6
        await honest.close()
