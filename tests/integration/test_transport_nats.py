"""What only a real server can show: kill -9 and restart, lost replies, hostile headers, drift,
permissions, deadlines.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import nats
import pytest

from shared.cancelling import cancel_and_wait
from shared.contracts.streams import ensure_node_streams
from shared.transport import blobs
from shared.transport.base import AccessDenied, ConsumerSpec, NotConnected, Retention, StreamSpec, Transport
from shared.transport.connect import connect
from shared.transport.deadline import Deadline
from shared.transport.nats import direct
from swarm_cli.shipped import NATS_CONFIG
from tests.nats_server import NatsServer, find_binary, free_port

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


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed_while_publishing_and_fetching(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as writer, opened(server.url) as reader:
        await writer.ensure_stream(QUEUE)
        await writer.ensure_consumer("QUEUE", WORKER)
        total, acks = 300, []
        seen: dict[int, set[int]] = {}

        async def publish_all() -> None:
            for number in range(total):
                acks.append(await published(writer, b"%d" % number, f"m{number}"))
                await asyncio.sleep(0.005)

        async def fetch_all() -> None:
            while len(seen) < total:
                for delivery in await reader.fetch("QUEUE", "worker", 8, 2.0):
                    seen.setdefault(int(delivery.message.inline or b"-1"), set()).add(delivery.message.seq)
                    await delivery.ack()

        async def kill_twice() -> None:
            for _ in range(2):
                await asyncio.sleep(0.6)
                server.kill()
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.start)

        async with asyncio.timeout(120):
            await asyncio.gather(publish_all(), fetch_all(), kill_twice())
        assert set(seen) == set(range(total))
        assert len({ack.seq for ack in acks}) == total, "two messages were acknowledged as one"
        # A restarted server knows the ids of the messages that it still holds. A message that was
        # taken off the queue before its publisher heard of it is therefore stored again by the
        # retry: one at most for each time the server was killed.
        again = [number for number, seqs in seen.items() if len(seqs) > 1]
        assert (await reader.stream_state("QUEUE")).last_seq == total + len(again)
        assert len(again) <= 2
        assert writer.counters.reconnects >= 2


async def test_a_fetch_under_way_during_a_restart_goes_on_within_its_own_timeout(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.ensure_stream(QUEUE)
        await transport.ensure_consumer("QUEUE", WORKER)
        started = time.monotonic()
        waiting = asyncio.create_task(transport.fetch("QUEUE", "worker", 8, 60.0))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.restart)
        await published(transport, b"after", "1")
        deliveries = await waiting
        assert time.monotonic() - started < 40.0
        deliveries = deliveries or await transport.fetch("QUEUE", "worker", 8, 3.0)
        assert [delivery.message.inline for delivery in deliveries] == [b"after"]


async def test_fetching_while_the_server_is_away_gives_nothing_in_time_and_publishing_an_error(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.ensure_stream(QUEUE)
        await transport.ensure_consumer("QUEUE", WORKER)
        server.kill()
        started = time.monotonic()
        assert await transport.fetch("QUEUE", "worker", 1, 0.5) == []
        assert not transport.connected
        with pytest.raises(NotConnected):
            await published(transport, b"x", "1", timeout_s=0.5)
        with pytest.raises(NotConnected):
            await transport.read("QUEUE", 1, 1, timeout_s=0.5)
        assert time.monotonic() - started < 15.0
        server.start()
        assert (await published(transport, b"x", "1")).seq == 1


async def test_an_ack_that_nobody_confirms_is_logged_and_the_message_comes_again(
    nats_server: MakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shared.transport.nats.pull.ACK_TIMEOUT_S", 0.5)
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.ensure_stream(QUEUE)
        await transport.ensure_consumer("QUEUE", WORKER)
        await published(transport, b"x", "1")
        [delivery] = await transport.fetch("QUEUE", "worker", 1, 2.0)
        server.kill()
        await delivery.ack()
        server.start()
        again = []
        async with asyncio.timeout(120):
            while not again:
                again = await transport.fetch("QUEUE", "worker", 1, 2.0)
        assert again[0].message.inline == b"x"
        await again[0].ack()
        assert (await transport.stream_state("QUEUE")).messages == 0


async def test_closing_just_as_the_server_goes_away_raises_nothing(nats_server: MakeServer):
    """A cluster that is deleted ends its servers together with the services, which then must still
    end with 0.
    """
    for _ in range(5):
        server = nats_server()
        transport = await connect(server.url, name="test", timeout_s=5.0)
        client = transport._connection.client  # type: ignore[attr-defined]
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            while not client.is_reconnecting:  # noqa: ASYNC110 - the very turn of the loop matters
                await asyncio.sleep(0)
        await transport.close()
        assert client.is_closed


@pytest.mark.parametrize("server_is_there", [True, False])
async def test_a_cancelled_close_closes_and_stays_cancelled_at_whatever_turn(nats_server: MakeServer, server_is_there: bool):
    server = nats_server()
    for turns in range(12):
        transport = await connect(server.url, name="test", timeout_s=5.0)
        client = transport._connection.client  # type: ignore[attr-defined]
        if not server_is_there:
            server.kill()
            await asyncio.sleep(0.05)
        task = asyncio.create_task(transport.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        if turns == 0 or was_done:
            await asyncio.wait([task])
            await transport.close()
        else:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert client.is_closed
        if not server_is_there:
            server.start()


async def test_closing_while_a_connection_is_opened_anew_leaves_none_behind(nats_server: MakeServer):
    """Behind a line so slow that the handshake is under way when the process is asked to end."""
    server, lines, open_lines, delay_s = nats_server(), 0, 0, 0.0

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slowly: bool) -> None:
        with suppress(OSError):
            while block := await reader.read(65536):
                await asyncio.sleep(delay_s if slowly else 0.0)
                writer.write(block)
        writer.close()

    async def line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lines, open_lines
        lines, open_lines = lines + 1, open_lines + 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(carry(reader, far_writer, False), carry(far_reader, writer, True))
        open_lines -= 1

    slow = await asyncio.start_server(line, "127.0.0.1", 0)
    transport = await connect(f"nats://127.0.0.1:{slow.sockets[0].getsockname()[1]}", name="test", timeout_s=5.0)
    delay_s = 0.5
    await transport._connection.client.close()  # type: ignore[attr-defined]
    async with asyncio.timeout(120):
        while lines < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await transport.close()
        while open_lines:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    slow.close()


async def test_connecting_to_a_dead_server_fails_at_its_deadline_and_says_what_to_do():
    url = f"nats://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(NotConnected, match=f"no NATS server answers at {url} after 0.7 s.*make run.*nats.node_url"):
        await connect(url, name="test", timeout_s=0.7)
    assert time.monotonic() - started < 15.0


async def test_connecting_with_wrong_credentials_names_the_reason(nats_server: MakeServer):
    server = nats_server(config='authorization { user: a, password: "b" }')
    with pytest.raises(AccessDenied, match="wants a key and none is given: set nats.node_key_file"):
        await connect(server.url, name="test", timeout_s=1.0)


async def test_a_connection_that_the_client_gave_up_on_is_opened_anew(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.ensure_stream(QUEUE)
        watch = transport.kv.watch("state", "k", poll_s=0.3)
        await transport.kv.ensure("state")
        await transport.kv.put("state", "k", b"1")
        assert (await anext(watch)).value == b"1"
        given_up = transport._connection.client  # type: ignore[attr-defined]
        server.configure('authorization { user: a, password: "b" }')
        server.reload()
        async with asyncio.timeout(120):
            while not given_up.is_closed:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        server.configure()
        server.reload()
        assert (await published(transport, b"x", "1", timeout_s=20)).seq == 1
        await transport.kv.put("state", "k", b"2")
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"2"


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


async def test_a_publish_whose_acknowledgement_was_lost_is_stored_once_and_is_no_conflict(nats_server: MakeServer):
    server = nats_server()
    async with LossyProxy(server.port) as proxy, opened(f"nats://127.0.0.1:{proxy.port}") as transport:
        await transport.ensure_stream(LOG)
        await transport.publish("log.a", b"0", stream="LOG", message_id="0")
        for number, expected in ((1, None), (2, 2)):
            proxy.lose_replies = True
            publishing = asyncio.create_task(
                transport.publish("log.a", b"x", stream="LOG", message_id=f"{number}", expected_last_seq=expected, timeout_s=10)
            )
            await asyncio.sleep(0.5)
            proxy.lose_replies = False
            ack = await publishing
            assert (ack.seq, ack.duplicate) == (number + 1, True)
        assert (await transport.stream_state("LOG")).messages == 3


async def test_a_batch_of_which_a_reply_was_lost_ends_before_the_gap():
    def reply(seq: int, previous: int) -> SimpleNamespace:
        headers = {
            "Nats-Subject": "log.a",
            "Nats-Sequence": str(seq),
            "Nats-Time-Stamp": "2026-11-21T08:36:40.764435407Z",
            "Nats-Last-Sequence": str(previous),
        }
        return SimpleNamespace(headers=headers, data=b"x", reply="")

    end = SimpleNamespace(headers={"Status": "204", "Nats-Num-Pending": "0", "Nats-Last-Sequence": "9"}, data=b"", reply="")
    for replies, seqs in (
        ([reply(3, 0), reply(5, 3), reply(9, 7), end], [3, 5]),
        ([reply(3, 0), reply(5, 3), end], [3, 5]),
    ):
        queue: asyncio.Queue = asyncio.Queue()
        for each in replies:
            queue.put_nowait(each)
        page = await direct._collect("LOG", queue, Deadline(1.0))
        assert page is not None
        assert [message.seq for message in page.messages] == seqs
        assert page.next_seq == 6, "the reader must ask again from where the gap begins"


@pytest.mark.parametrize(
    "block",
    [
        b"NATS/1.0\r\nNats-Sequence: 99\r\nNats-Sequence: 98\r\nNats-Subject: log.forged\r\nNats-Stream: X\r\n\r\n",
        b"NATS/1.0\r\nStatus: 204\r\nNats-Last-Sequence: 0\r\nNats-Num-Pending: 0\r\n\r\n",
        b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\n\r\n",
        b"NATS/1.0 404 No Messages\r\n\r\n",
        b"NATS/1.0 204 EOB\r\nX: \xff\r\n\r\n",
        b"NATS/1.0 204 \xff\r\n\r\n",
        b"NATS/1.0 \xff\xff\xff\r\n\r\n",
        b"NATS/1.0 204\r\nX: \xff\r\n\r\n",
        b"NATS/1.0 \xc2\xb2\xc2\xb2\r\n\r\n",
        b"NATS/1.0",
        b"NATS/1.0\r\n",
        b"NATS/1.0\r\nX: \xff\xfe\xff\r\n\r\n",
        b"NATS/1.0\r\nno colon at all\r\n\r\n",
        b"NATS/1.0\r\n: empty\r\n\r\n",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nSwarm-Blob: -1 x y\r\n\r\n",
        b"NATS/1.0\r\nSwarm-Blob: \xc2\xb2\r\n\r\n",
    ],
)
async def test_hostile_headers_neither_stop_a_reader_nor_pass_for_the_server_s_own(nats_server: MakeServer, block: bytes):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.ensure_stream(LOG)
        await transport.publish("log.a", b"before", stream="LOG", message_id="1")
        await sent_raw(server, "log.evil", block, times=2)
        await transport.publish("log.a", b"after", stream="LOG", message_id="2")
        for batch in (10, 2, 1):
            seen, position = [], 1
            while messages := await transport.read("LOG", position, batch):
                seen += messages
                position = messages[-1].seq + 1
            assert [m.inline for m in seen if m.subject == "log.a"] == [b"before", b"after"]
            assert [m.seq for m in seen] == sorted({m.seq for m in seen})
            assert {m.seq for m in seen} <= {1, 2, 3, 4}
            assert {m.subject for m in seen} <= {"log.a", "log.evil"}
        evil = await transport.get("LOG", 2)
        assert evil is None or (evil.seq, evil.subject) == (2, "log.evil")


async def test_work_is_fetched_and_acknowledged_with_the_second_acknowledgement_format_too(nats_server: MakeServer):
    server = nats_server(config="feature_flags { js_ack_fc_v2: true }")
    async with opened(server.url) as transport:
        await transport.ensure_stream(QUEUE)
        await transport.ensure_consumer("QUEUE", WORKER)
        await published(transport, b"x", "1")
        [delivery] = await transport.fetch("QUEUE", "worker", 1, 2.0)
        assert (delivery.message.seq, delivery.deliveries, delivery.message.inline) == (1, 1, b"x")
        await delivery.ack()
        assert (await transport.stream_state("QUEUE")).messages == 0


@pytest.mark.parametrize("max_payload", ["1MB", "8MB"])
async def test_many_large_messages_are_read_under_any_payload_limit(nats_server: MakeServer, max_payload: str):
    server = nats_server(config=f"max_payload: {max_payload}")
    async with opened(server.url) as transport:
        await transport.ensure_stream(LOG)
        payloads = [bytes([number]) * 3_500_000 for number in range(8)]
        for number, payload in enumerate(payloads):
            await transport.publish("log.a", payload, stream="LOG", message_id=f"{number}", timeout_s=20)
        messages = await transport.read("LOG", 1, 100, timeout_s=20)
        assert [message.size_bytes for message in messages] == [3_500_000] * 8
        assert [await transport.payload(message) for message in messages] == payloads


async def test_chunks_whose_message_never_came_are_swept(nats_server: MakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blobs, "ORPHAN_AGE_S", 0.3)
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.ensure_stream(QUEUE)
        for number in range(3):
            await transport._chunks.put_chunk("blob.queue", b"%d" % number, stream="QUEUE_BLOBS", timeout_s=5.0)  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        await published(transport, bytes(3_000_000), "1")
        await transport.ensure_stream(QUEUE)
        state = await transport.stream_state("QUEUE_BLOBS")
        assert state.first_seq == 4 and state.messages > 0
        [message] = await transport.read("QUEUE", 1, 1)
        assert len(await transport.payload(message)) == 3_000_000


async def test_a_watch_keeps_no_consumer_on_the_server_that_could_be_lost_and_outlives_a_restart(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport, opened(server.url) as writer:
        await transport.kv.ensure("state", history=4)
        await writer.kv.put("state", "policy", b"1")
        watch = transport.kv.watch("state", "policy", poll_s=1.0)
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"1"
        assert (await asked(server, "CONSUMER.LIST.KV_state"))["total"] == 0
        for round_number in (2, 3):
            await asyncio.to_thread(server.restart)
            await writer.kv.put("state", "policy", b"%d" % round_number)
            assert (await asyncio.wait_for(anext(watch), 120)).value == b"%d" % round_number


async def test_a_watch_whose_pushes_never_arrive_still_polls(nats_server: MakeServer):
    users = '{ user: watcher, password: w, permissions: { subscribe: { deny: ["$KV.>"] } } }, { user: writer, password: w }'
    server = nats_server(config=f"authorization {{ users: [ {users} ] }}")
    watcher, writer = (f"nats://{user}:w@127.0.0.1:{server.port}" for user in ("watcher", "writer"))
    async with opened(watcher) as reading, opened(writer) as writing:
        await writing.kv.ensure("state")
        await writing.kv.put("state", "policy", b"1")
        watch = reading.kv.watch("state", "policy", poll_s=0.3)
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"1"
        following = asyncio.create_task(anext(watch))
        await asyncio.sleep(0.1)
        await writing.kv.put("state", "policy", b"2")
        assert (await asyncio.wait_for(following, 3)).value == b"2"


async def test_a_message_that_breaks_the_client_s_parser_does_not_end_a_watch(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.kv.ensure("state")
        await transport.kv.put("state", "policy", b"1")
        watch = transport.kv.watch("state", "policy", poll_s=0.2)
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"1"
        following = asyncio.create_task(anext(watch))
        await asyncio.sleep(0.1)
        await sent_raw(server, "$KV.state.policy", b"NATS/1.0 204 \xff\r\n\r\n")
        assert (await asyncio.wait_for(following, 120)).value == b""
        await transport.kv.put("state", "policy", b"2")
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"2"
        assert transport.counters.errors["malformed"] == sum(transport.counters.errors.values()) == 1


async def test_a_watch_follows_a_bucket_that_was_made_anew(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.kv.ensure("state")
        for value in (b"1", b"2", b"3"):
            await transport.kv.put("state", "policy", value)
        watch = transport.kv.watch("state", "policy", poll_s=0.2)
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"3"
        await asked(server, "STREAM.DELETE.KV_state")
        await transport.kv.ensure("state")
        await transport.kv.put("state", "policy", b"new")
        assert (await asyncio.wait_for(anext(watch), 120)).value == b"new"


async def test_a_bucket_cannot_be_wiped_with_a_rollup(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.kv.ensure("state")
        for key in ("a", "b"):
            await transport.kv.put("state", key, b"1")
        client = await nats.connect(server.url)
        answer = await client.request("$KV.state.a", b"2", headers={"Nats-Rollup": "all"}, timeout=5)
        await client.close()
        assert "rollup" in json.loads(answer.data)["error"]["description"]
        assert len(await transport.kv.all("state")) == 2


async def test_drift_is_corrected_and_what_an_operator_set_besides_is_kept(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await asked(
            server,
            "STREAM.CREATE.LOG",
            {"name": "LOG", "subjects": ["log.a"], "max_msgs": 5, "max_msgs_per_subject": 4, "allow_direct": False},
        )
        await transport.ensure_stream(LOG)
        config = (await asked(server, "STREAM.INFO.LOG"))["config"]
        assert (config["subjects"], config["max_msgs"], config["allow_direct"]) == (["log.>"], -1, True)
        assert config["max_msgs_per_subject"] == 4
        await transport.ensure_stream(QUEUE)
        durable = {"durable_name": "worker", "ack_policy": "explicit", "ack_wait": 10**9, "max_deliver": 2}
        await asked(server, "CONSUMER.CREATE.QUEUE.worker", {"stream_name": "QUEUE", "config": {**durable, "name": "worker"}})
        await transport.ensure_consumer("QUEUE", WORKER)
        consumer = (await asked(server, "CONSUMER.INFO.QUEUE.worker"))["config"]
        assert (consumer["max_deliver"], consumer["max_ack_pending"]) == (10, 100)


async def test_the_embedded_server_s_configuration_is_valid_and_holds_two_nodes(tmp_path: Path):
    port, monitoring = free_port(), free_port()
    config = NATS_CONFIG
    command = [find_binary(), "-c", str(config), "-p", str(port), "-m", str(monitoring), "-sd", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            command, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        async with opened(f"nats://127.0.0.1:{port}") as transport:
            for node in ("alpha", "beta"):
                await ensure_node_streams(transport, node)
            assert transport._connection.max_payload_bytes == 8 * 1024 * 1024  # type: ignore[attr-defined]
            await transport.publish("node.alpha.scored", b"x", stream="NODE_ALPHA_SCORED", message_id="1")
    finally:
        process.kill()
        process.wait()
