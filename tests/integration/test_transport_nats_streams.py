"""What streams of a real server hold and hand out: hostile headers, large messages under any
payload limit, chunks left over, settings that drifted, the configuration that is shipped.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from shared.contracts.streams import ensure_node_streams
from shared.transport import blobs
from shared.transport.nats.pull import fetch
from swarm_cli.installation import NATS_CONFIG
from tests.integration.nats_transports import LOG, QUEUE, WORKER, MakeServer, asked, opened, published, sent_raw
from tests.nats_server import find_binary, free_port


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
        [delivery] = await fetch(transport, "QUEUE", "worker", 1, 2.0)
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
            await transport.chunks.put_chunk("blob.queue", b"%d" % number, stream="QUEUE_BLOBS", timeout_s=5.0)  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        await published(transport, bytes(3_000_000), "1")
        await transport.ensure_stream(QUEUE)
        state = await transport.stream_state("QUEUE_BLOBS")
        assert state.first_seq == 4 and state.messages > 0
        [message] = await transport.read("QUEUE", 1, 1)
        assert len(await transport.payload(message)) == 3_000_000


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
            assert transport.connection.max_payload_bytes == 8 * 1024 * 1024  # type: ignore[attr-defined]
            await transport.publish("node.alpha.scored", b"x", stream="NODE_ALPHA_SCORED", message_id="1")
    finally:
        process.kill()
        process.wait()
