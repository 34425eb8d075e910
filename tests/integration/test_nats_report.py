"""`swarm nats report` against a real server: what is well, what is wrong, and more streams and
consumers than JetStream lists at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.contracts.subjects import VERIFIER_CONSUMER, node_rollouts, node_rollouts_stream
from shared.transport.connect import connect
from shared.transport.nats.pull import fetch
from shared.transport.nats.transport import NatsTransport
from swarm_cli.app import app
from swarm_cli.nats import report as nats_report
from tests.nats_server import NatsServer

QUEUE = node_rollouts_stream("alpha")
MANY = 300
"""More than a page of JetStream's lists, which has 256."""


def report(url: str, *words: str) -> tuple[int, str, str]:
    """Exit code, what it printed, and the sentence that it ended with."""
    told = {"SWARM_NODE__ID": "alpha", "SWARM_NATS__NODE_URL": url, "SWARM_NATS__SWARM_URL": url}
    done = CliRunner().invoke(app, ["nats", "report", *words], env=told)
    return done.exit_code, done.stdout, str(done.exception or "")


async def prepared(url: str) -> NatsTransport:
    transport = await connect(url, name="test")
    assert isinstance(transport, NatsTransport)
    await ensure_node_streams(transport, "alpha")
    await ensure_swarm_streams(transport)
    return transport


async def ask(transport: NatsTransport, subject: str, **body: Any) -> None:
    answer = await transport.connection.client.request(f"$JS.API.{subject}", json.dumps(body).encode(), timeout=10)
    assert "error" not in json.loads(answer.data), answer.data


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "server").start()
    yield server
    server.kill()


def test_a_server_that_is_well_is_shown_on_one_screen_and_what_is_wrong_ends_with_a_sentence_and_code_1(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # that of the terminal that runs the tests

    async def work(groups: int, *, take: bool) -> None:
        node = await prepared(server.url)
        for number in range(groups):
            await node.publish(node_rollouts("alpha"), b"group", stream=QUEUE, message_id=f"{groups}-{number}")
        if take:
            await fetch(node, QUEUE, VERIFIER_CONSUMER, 2, 5.0)
        await node.close()

    asyncio.run(work(3, take=True))
    code, shown, _ = report(server.url)
    assert code == 0, shown
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith(("NODE_", "SWARM_", "KV_"))}
    assert lines.keys() >= {QUEUE, "SWARM_ROLLOUTS", "KV_node_alpha", "NODE_ALPHA_SCORED_BLOBS"}
    consumer = next(line.split() for line in shown.splitlines() if line.startswith(f"{QUEUE} {VERIFIER_CONSUMER}"))
    assert consumer[2:4] == ["1", "2"]  # waiting, and out

    code, shown, _ = report(server.url, "--node", "alpha", "--json")
    found = json.loads(shown)
    assert (
        code == 0
        and found["findings"] == []
        and {each["name"] for each in found["streams"]} == {name for name in lines if "SWARM" not in name and "swarm" not in name}
    )

    # Nobody acknowledges; after a second of that it has stalled by this report's measure.
    asyncio.run(asyncio.sleep(1.1))
    monkeypatch.setattr(nats_report, "STALLED_S", 1.0)
    code, shown, told = report(server.url)
    assert code == 1 and "1 finding:" in told and "consumer verifier" in told and "stalled: 3 messages wait" in told, told

    asyncio.run(work(470, take=False))
    monkeypatch.setattr(nats_report, "STALLED_S", 1000.0)
    code, shown, told = report(server.url)
    assert code == 1 and "1 finding:" in told and f"{QUEUE} is 92% full and refuses" in told, told
    wrong_first = [line for line in shown.splitlines() if line.startswith(("NODE_", "KV_", "SWARM_"))][0]
    assert wrong_first.startswith(QUEUE)


def test_more_streams_and_consumers_than_the_api_lists_at_a_time_are_all_there(server: NatsServer) -> None:
    async def make_many() -> None:
        node = await prepared(server.url)
        kept = {"storage": "memory", "num_replicas": 1}
        await asyncio.gather(
            *(
                ask(node, f"STREAM.CREATE.MANY_{each}", name=f"MANY_{each}", subjects=[f"many.{each}"], **kept)
                for each in range(MANY)
            )
        )
        wanted = [{"durable_name": f"c{each}", "ack_policy": "explicit", "mem_storage": True} for each in range(MANY)]
        await asyncio.gather(
            *(
                ask(
                    node,
                    f"CONSUMER.CREATE.MANY_0.{each['durable_name']}",
                    stream_name="MANY_0",
                    config={"name": each["durable_name"], **each},
                )
                for each in wanted
            )
        )
        await node.close()

    asyncio.run(make_many())
    code, shown, told = report(server.url, "--json")
    streams = {each["name"]: each for each in json.loads(shown)["streams"]}
    assert code == 0 and {f"MANY_{each}" for each in range(MANY)} < streams.keys(), told
    assert len(streams["MANY_0"]["consumers"]) == MANY and json.loads(shown)["left_out"] == 0
    code, shown, _ = report(server.url)
    assert code == 0 and "more streams (--json has all)" in shown and len(shown.splitlines()) < 140
