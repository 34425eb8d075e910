"""A hub, or somebody between, that announces or sends without end: a client keeps its memory."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from shared.transport.base import AccessDenied, Deadline, NotConnected
from shared.transport.connect import connect
from shared.transport.nats import client, direct
from shared.transport.nats import connection as complaints_module
from shared.transport.nats import connection as connections
from shared.transport.nats.client import LARGEST_MESSAGE_BYTES, LINE_BYTES, USUAL_MESSAGE_BYTES
from shared.transport.nats.connection import Connection, Options
from tests.secured_server import make_certificates

Says = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
INFO: dict[str, Any] = {"server_id": "S", "version": "2.15.1", "headers": True, "max_payload": 1_000_000, "proto": 1}


@pytest.fixture(autouse=True)
def uncached_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that was used under an earlier configuration keeps it, and is not captured."""
    monkeypatch.setattr(complaints_module, "log", structlog.get_logger())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RECONNECT_WAIT_S", 0.01)
    monkeypatch.setattr(client, "CLOSING_S", 0.1)


class Hub:
    """Greets as a server does, then says what a test wants it to, as no real server can be made
    to.
    """

    def __init__(self, says: Says, greetings: list[bytes], tls: ssl.SSLContext | None = None) -> None:
        self._says, self._greetings, self._tls = says, greetings, tls
        self.over = asyncio.Event()
        self.connections, self.port = 0, 0
        self.taken = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = self._greetings[min(self.connections, len(self._greetings) - 1)]
        self.connections += 1
        try:
            writer.write(greeting)
            if self._tls is not None:
                await writer.start_tls(self._tls)
            while (line := await reader.readline()) and not line.startswith(b"PING"):
                pass
            writer.write(b"PONG\r\n")
            await self._says(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()


def info(**other: Any) -> bytes:
    return b"INFO " + json.dumps({**INFO, **other}).encode() + b"\r\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """An authority's file, and what a hub with a certificate by it shows."""
    authority, certificate, key = make_certificates(tmp_path_factory.mktemp("tls"))
    shown = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    shown.load_cert_chain(certificate, key)
    return authority, shown


@asynccontextmanager
async def hub(says: Says, *greetings: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Hub]:
    made = Hub(says, list(greetings or [info(tls_required=tls is not None)]), tls)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.over.set()
        server.close()


@asynccontextmanager
async def client_of(*made: Hub, ca_file: Path | None = None) -> AsyncIterator[Connection]:
    urls = [f"{'tls' if ca_file else 'nats'}://127.0.0.1:{each.port}" for each in made]
    connection = Connection(Options(url=",".join(urls), name="test", ca_file=str(ca_file) if ca_file else None))
    await connection.open(10.0)
    try:
        yield connection
    finally:
        await connection.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers pings, and nothing else."""
    while line := await reader.readline():
        if line.startswith(b"PING"):
            writer.write(b"PONG\r\n")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"MSG x 1 2000000000\r\n", "announces a message of 2000000000 bytes"),
        (b"HMSG x 1 20 2000000000\r\n", "announces a message of 2000000000 bytes"),
        (b"HMSG x 1 900000 10\r\n", "headers are longer than the whole"),
        (b"MSG " + b"x" * (LINE_BYTES + 1), "a line of the server goes on after"),
        (b"INFO " + b"x" * (LINE_BYTES + 1), "a line of the server goes on after"),
        (b"INFO []\r\n", "INFO is no object"),
        (b"INFO " + b"[" * 20_000 + b"\r\n", "cannot be read"),
        (b'INFO {"max_payload": -1}\r\n', "max_payload is no size"),
        (b"-ERR\r\n", "cannot be read"),
        (b"NONSENSE\r\n", "cannot be read"),
    ],
)
async def test_a_server_that_announces_without_end_or_nonsense_loses_the_connection_and_is_told(said: bytes, words: str) -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if made.connections == 1:
            writer.write(said)
        await quiet(reader, writer)

    with capture_logs() as logs:
        async with hub(says) as made, client_of(made) as connection:
            await until(lambda: connection.counters.reconnects == 1)
        assert any(words in str(line.get("error")) for line in logs), logs
        assert connection.counters.errors["malformed"] == 1
        assert len(connection.client._ps.buf) <= LINE_BYTES


async def test_a_message_as_long_as_servers_of_ours_take_is_received_whatever_this_one_announced() -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not (await reader.readline()).startswith(b"SUB"):
            pass
        writer.write(b"MSG x 1 %d\r\n" % USUAL_MESSAGE_BYTES + bytes(USUAL_MESSAGE_BYTES) + b"\r\n")
        await quiet(reader, writer)

    async with hub(says) as made, client_of(made) as connection:
        found = await connection.client.subscribe("x")
        assert len((await found.next_msg(timeout=120)).data) == USUAL_MESSAGE_BYTES


async def test_no_server_talks_a_client_into_more_than_servers_ever_take() -> None:
    async with hub(quiet, info(max_payload=10**15)) as made, client_of(made) as connection:
        assert connection.max_payload_bytes == LARGEST_MESSAGE_BYTES


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_client_goes_to_no_server_but_those_it_was_given(
    encrypted: bool, certificates: tuple[Path, ssl.SSLContext]
) -> None:
    """Others are named in the greeting, which comes before TLS and which somebody between may
    change, in that of each later connection, and within one.
    """

    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if made.connections > 1:
            writer.write(info(connect_urls=elsewhere))
            await quiet(reader, writer)

    authority, shown = certificates
    tls = shown if encrypted else None
    async with hub(quiet, tls=tls) as other:
        elsewhere = [f"127.0.0.1:{other.port}", *(f"192.0.2.1:{port}" for port in range(1, 63))]
        greeting = info(tls_required=encrypted, connect_urls=elsewhere)
        async with hub(says, greeting, tls=tls) as made, client_of(made, ca_file=authority if encrypted else None) as connection:
            await until(lambda: connection.counters.reconnects == 1)
            await connection.client.flush()
            assert [each.uri.port for each in connection.client.server_pool] == [made.port]
            assert other.connections == 0


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_server_that_takes_nothing_more_is_left_though_bytes_for_it_are_unsent(
    encrypted: bool, certificates: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if made.connections == 1:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await made.over.wait()
        await quiet(reader, writer)

    monkeypatch.setattr(connections, "PING_INTERVAL_S", 0.02)
    authority, shown = certificates
    tls, ca_file = (shown, authority) if encrypted else (None, None)
    async with hub(says, tls=tls) as made, client_of(made, ca_file=ca_file) as connection:
        for _ in range(20):
            await connection.send("x", bytes(900_000))
        await until(lambda: connection.counters.reconnects == 1 and connection.connected)


@pytest.mark.parametrize("does", ["resets", "waits"])
async def test_a_server_without_an_end_of_its_handshake_leaves_time_for_the_next_one(
    does: str, certificates: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.set()
        writer.write(info(tls_required=True))
        await reader.read(10)
        if does == "resets":
            writer.transport.abort()
        await made.over.wait()
        writer.close()

    monkeypatch.setattr("nats.aio.client.shuffle", lambda servers: None)
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT_S", 0.3)
    authority, shown = certificates
    tried = asyncio.Event()
    async with hub(quiet, tls=shown) as made, await asyncio.start_server(serve, "127.0.0.1", 0) as bad:
        urls = [f"tls://127.0.0.1:{port}" for port in (bad.sockets[0].getsockname()[1], made.port)]
        connection = Connection(Options(url=",".join(urls), name="test", ca_file=str(authority)))
        await connection.open(5.0)
        assert tried.is_set() and connection.client.connected_url.port == made.port
        await connection.close()


@pytest.mark.parametrize("greeting", [b"INFO []\r\n", b"INFO " + b"x" * 100_000 + b"\r\n", info(max_payload="much")])
async def test_a_greeting_that_cannot_be_read_does_not_end_reconnecting(greeting: bytes) -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if made.connections > 1:
            await quiet(reader, writer)

    async with hub(says, info(), greeting, info()) as made, client_of(made) as connection:
        await until(lambda: connection.counters.reconnects == 1 and made.connections >= 3)


@pytest.mark.slow
async def test_a_greeting_that_cannot_be_read_is_the_reason_why_there_is_no_connection() -> None:
    async with hub(quiet, b"INFO []\r\n") as made:
        connection = Connection(Options(url=f"nats://127.0.0.1:{made.port}", name="test"))
        with pytest.raises(NotConnected, match="greeting cannot be read"):
            await connection.open(3.0)  # it tries to the end; on a busy machine half a second was none


async def test_a_batch_that_does_not_end_is_cut_at_what_was_asked_for() -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inbox = b""
        while not inbox:
            line = await reader.readline()
            if line.startswith(b"PUB"):
                inbox = line.split()[2]
        head = b"NATS/1.0\r\nNats-Subject: a\r\nNats-Sequence: %d\r\nNats-Time-Stamp: 2026-01-01T00:00:00Z\r\n"
        head += b"Nats-Last-Sequence: %d\r\n\r\n"
        for seq in range(1, 5_000):
            lines = head % (seq, seq - 1)
            writer.write(b"HMSG %s 1 %d %d\r\n%s\r\n" % (inbox, len(lines), len(lines), lines))
        await quiet(reader, writer)

    async with hub(says) as made, client_of(made) as connection, asyncio.timeout(120):
        found = await direct.batch(connection, "LOG", {"seq": 1, "batch": 10}, Deadline(5.0))
        assert len(found.messages) <= direct.MAX_BATCH + 1


async def test_websockets_whose_frames_nobody_bounds_are_refused() -> None:
    with pytest.raises(AccessDenied, match="nats:// or tls://"):
        await connect("ws://127.0.0.1:1", name="test", timeout_s=0.5)
