"""What only a real server can show of a connection: kill -9 and restart, lost replies, closing at
any moment, wrong credentials, deadlines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from shared.transport.base import AccessDenied, Deadline, NotConnected
from shared.transport.connect import connect
from shared.transport.nats import direct
from shared.transport.nats.pull import fetch
from tests.integration.nats_transports import LOG, QUEUE, WORKER, LossyProxy, MakeServer, opened, published
from tests.nats_server import free_port


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
                for delivery in await fetch(reader, "QUEUE", "worker", 8, 2.0):
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
        waiting = asyncio.create_task(fetch(transport, "QUEUE", "worker", 8, 60.0))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.restart)
        await published(transport, b"after", "1")
        deliveries = await waiting
        assert time.monotonic() - started < 40.0
        deliveries = deliveries or await fetch(transport, "QUEUE", "worker", 8, 3.0)
        assert [delivery.message.inline for delivery in deliveries] == [b"after"]


async def test_fetching_while_the_server_is_away_gives_nothing_in_time_and_publishing_an_error(nats_server: MakeServer):
    server = nats_server()
    async with opened(server.url) as transport:
        await transport.ensure_stream(QUEUE)
        await transport.ensure_consumer("QUEUE", WORKER)
        server.kill()
        started = time.monotonic()
        assert await fetch(transport, "QUEUE", "worker", 1, 0.5) == []
        assert not transport.connected
        with pytest.raises(NotConnected, match="`swarm up`"):
            await published(transport, b"x", "1", timeout_s=0.5)
        with pytest.raises(NotConnected, match="`swarm up`"):
            await transport.kv.buckets()
        with pytest.raises(NotConnected, match="`swarm up`"):
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
        [delivery] = await fetch(transport, "QUEUE", "worker", 1, 2.0)
        server.kill()
        await delivery.ack()
        server.start()
        again = []
        async with asyncio.timeout(120):
            while not again:
                again = await fetch(transport, "QUEUE", "worker", 1, 2.0)
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
        client = transport.connection.client  # type: ignore[attr-defined]
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
        client = transport.connection.client  # type: ignore[attr-defined]
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
    await transport.connection.client.close()  # type: ignore[attr-defined]
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
        given_up = transport.connection.client  # type: ignore[attr-defined]
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
