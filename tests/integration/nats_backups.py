"""What tests of `swarm nats backup` and `restore` share: a node's filled server, one without
streams, and what is on them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.contracts.subjects import (
    POLICY_KEY,
    VERIFIER_CONSUMER,
    node_bucket,
    node_dead_letters,
    node_dead_letters_stream,
    node_rollouts,
    node_rollouts_stream,
    node_scored,
    node_scored_stream,
)
from shared.transport.connect import connect
from shared.transport.nats.pull import fetch
from shared.transport.nats.transport import NatsTransport
from swarm_cli.app import app
from tests.nats_server import NatsServer, delete_message

QUEUE, SCORED, DEAD = node_rollouts_stream("alpha"), node_scored_stream("alpha"), node_dead_letters_stream("alpha")
BUCKET = "KV_node_alpha"
LARGE = b"large group " * 200_000
"""More than one message may hold: it travels in chunks."""
DEADLINE_S = 180.0


def swarm(*words: str, url: str = "", **environment: str) -> tuple[int, str]:
    """A `swarm nats` command in this process; its exit code and all it said, on one line."""
    told = {
        "SWARM_NODE__ID": "alpha",
        **({"SWARM_NATS__NODE_URL": url, "SWARM_NATS__SWARM_URL": url} if url else {}),
        **environment,
    }
    done = CliRunner().invoke(app, ["nats", *words], env=told)
    return done.exit_code, " ".join(f"{done.output} {done.exception or ''}".split())


async def opened(url: str, **options: str) -> NatsTransport:
    transport = await connect(url, name="test", timeout_s=DEADLINE_S, **options)
    assert isinstance(transport, NatsTransport)
    return transport


async def fill(url: str) -> None:
    """A node at work: three groups waiting of which one is out and one was acknowledged, others
    scored, one of them in chunks, a position."""
    transport = await opened(url)
    await ensure_node_streams(transport, "alpha")
    await ensure_swarm_streams(transport)
    for number in range(4):
        await transport.publish(node_rollouts("alpha"), b"group %d" % number, stream=QUEUE, message_id=f"draw-{number}")
    first, second = await fetch(transport, QUEUE, VERIFIER_CONSUMER, 2, 5.0)
    await first.ack()
    await transport.publish(node_scored("alpha"), LARGE, stream=SCORED, message_id="large")
    for number in range(20):
        await transport.publish(node_scored("alpha"), os.urandom(50_000), stream=SCORED, message_id=f"scored-{number}")
    letter = await transport.publish(node_dead_letters("alpha"), b"letter", stream=DEAD, message_id="letter")
    await delete_message(transport, DEAD, letter.seq)
    await transport.kv.put(node_bucket("alpha"), POLICY_KEY, b"version 7")
    await transport.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("source")).start()
    asyncio.run(fill(server.url))
    yield server
    server.kill()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[NatsServer]:
    """A server without streams."""
    server = NatsServer(tmp_path / "target").start()
    yield server
    server.kill()


async def states(url: str) -> dict[str, tuple[int, int, int, int]]:
    transport = await opened(url)
    names = [
        each["config"]["name"]
        for each in json.loads((await transport.connection.client.request("$JS.API.STREAM.LIST")).data)["streams"]
    ]
    found = {name: await transport.stream_state(name) for name in names}
    await transport.close()
    return {
        name: (each.messages, each.size_bytes, each.first_seq * bool(each.messages), each.last_seq) for name, each in found.items()
    }
