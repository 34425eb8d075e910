"""Groups that are given up on: how they get to the dead letters when a crash takes their last
delivery, and how a person sees them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import generate_latest
from typer.testing import CliRunner

from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.limits import NODE_LIMITS
from shared.contracts.streams import ensure_node_streams, verifier_consumer
from shared.dead_letters import bury, read_letters
from shared.transport.base import ConsumerSpec, Deadline, Transport
from shared.transport.connect import connect
from shared.transport.nats.pull import fetch
from shared.transport.nats.transport import connection_of
from swarm_cli.app import app
from tests.integration.running_verifier import configured, generate, group, queue_is_empty, scored, until, verifier
from tests.nats_server import NatsServer

MakeServer = Callable[..., NatsServer]
QUEUE = subjects.node_rollouts_stream("alpha")
DEAD = subjects.node_dead_letters_stream("alpha")


@asynccontextmanager
async def node_plane(url: str) -> AsyncIterator[Transport]:
    """A node's plane whose consumer delivers soon again."""
    plane = await connect(url, name="test")
    try:
        await ensure_node_streams(plane, "alpha")
        await plane.ensure_consumer(QUEUE, verifier_consumer(1.0))
        yield plane
    finally:
        await plane.close()


async def take_and_crash(url: str, times: int) -> None:
    """A verifier that takes a group and dies before it acknowledges, `times` times."""
    for _ in range(times):
        crashing = await connect(url, name="crashing")
        deliveries = []
        for _ in range(10):
            deliveries = await fetch(crashing, QUEUE, subjects.VERIFIER_CONSUMER, 1, 1.0)
            if deliveries:
                break
        assert deliveries
        await crashing.close()


async def test_a_group_whose_last_delivery_crashed_goes_to_the_dead_letters(nats_server: MakeServer, tmp_path: Path):
    """Also one that crashed more often than it has tries, while no verifier went on."""
    url = nats_server().url
    config = configured("alpha", url, tmp_path, ack_wait_s=1.0, max_deliver=2)
    async with node_plane(url) as plane:
        lost = group("alpha", 0)
        await generate(plane, lost)
        await take_and_crash(url, times=3)
        async with verifier(config) as alpha:
            await generate(plane, group("alpha", 1))
            await until(lambda: alpha.status.get("scored_local") == 1)
            await until(lambda: alpha.status.get("failed_local") == 1)
            await until(lambda: queue_is_empty(plane, "alpha"))
        (letter,) = await read_letters(plane, "alpha")
        assert (letter.cause, letter.group, letter.group_id) == ("not scored in 3 tries", lost, content_id(encode(lost)))
        assert sorted(each.failure or "" for each in await scored(plane, "alpha")) == ["", "not scored in 3 tries"]
        assert "swarm_groups_failed_total 1.0" in generate_latest(alpha.registry).decode()


async def test_a_server_whose_consumer_gave_up_after_some_deliveries_is_told_to_deliver_without_end(
    nats_server: MakeServer, tmp_path: Path
):
    url = nats_server().url
    async with node_plane(url) as plane:
        earlier = ConsumerSpec(name=subjects.VERIFIER_CONSUMER, ack_wait_s=1.0, max_deliver=5, max_ack_pending=256)
        await plane.ensure_consumer(QUEUE, earlier)
        await generate(plane, group("alpha", 0))
        await take_and_crash(url, times=1)
        async with verifier(configured("alpha", url, tmp_path, ack_wait_s=1.0)) as alpha:
            await until(lambda: alpha.status.get("scored_local") == 1)
        answer = await connection_of(plane).request(
            f"$JS.API.CONSUMER.INFO.{QUEUE}.{subjects.VERIFIER_CONSUMER}", b"", Deadline(5.0), what="the consumer"
        )
        assert json.loads(answer.data)["config"]["max_deliver"] == -1


async def test_a_group_whose_payload_is_gone_leaves_the_queue_and_does_not_hold_up_the_next(
    nats_server: MakeServer, tmp_path: Path
):
    url = nats_server(config="max_payload: 64KB").url
    async with node_plane(url) as plane:
        large = group("alpha", 0, [f"{number}" * 50_000 for number in range(3)])
        await generate(plane, large, group("alpha", 1))
        await plane.purge(f"{QUEUE}_BLOBS", 100)
        async with verifier(configured("alpha", url, tmp_path, max_deliver=2)) as alpha:
            await until(lambda: alpha.status.get("scored_local") == 1)
            await until(lambda: alpha.status.get("failed_local") == 1)
            await until(lambda: queue_is_empty(plane, "alpha"))
        (gone,) = await read_letters(plane, "alpha")
        assert "is gone" in gone.cause
        assert gone.group is None


def run(url: str, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["dlq", *arguments, "--node", "alpha", "--node-url", url])
    return result.exit_code, result.stdout + (str(result.exception) if result.exception else "")


async def test_a_person_lists_and_shows_dead_letters(nats_server: MakeServer, tmp_path: Path):
    url = nats_server().url
    async with node_plane(url) as plane:
        for index in range(2):
            await bury(plane, "alpha", encode(group("alpha", index)), "not scored in 4 tries", message_id=str(index))
        await plane.publish(subjects.node_dead_letters("alpha"), b"?", stream=DEAD, message_id="x", headers={"Swarm-Cause": "odd"})

        code, text = await asyncio.to_thread(run, url, "list", "--json")
        listed = json.loads(text)
        assert code == 0
        assert [(each["seq"], each["dataset"], each["draw"], each["cause"]) for each in listed] == [
            (1, "gcd", 0, "not scored in 4 tries"),
            (2, "gcd", 1, "not scored in 4 tries"),
            (3, None, None, "odd"),
        ]
        assert all(abs(each["buried_at"] - time.time()) < 60 for each in listed)
        code, text = await asyncio.to_thread(run, url, "show", "2")
        assert code == 0
        assert "question: Find the Greatest Common Divisor" in text
        assert "<answer>wrong</answer>" in text
        assert (await asyncio.to_thread(run, url, "list"))[0] == 0

        code, text = await asyncio.to_thread(run, url, "show", "9")
        assert code != 0 and "no dead letter 9" in text


async def test_letters_are_summed_up_by_cause_and_it_is_said_that_older_ones_are_gone(nats_server: MakeServer, tmp_path: Path):
    url = nats_server().url
    most = NODE_LIMITS.dead_letters_max_msgs
    async with node_plane(url) as plane:
        for number in range(most + 50):
            cause = "odd" if number == 700 else f"ValueError: no answer {number} in 'text {number}'"
            await bury(plane, "alpha", b"?", cause, message_id=str(number))
        code, text = await asyncio.to_thread(run, url, "list")
        lines = [line for line in text.splitlines() if line.strip()]
        assert code == 0 and len(lines) < 20, text
        assert f"{most - 1:,}" in text and str(most + 50) in text and "odd" in text
        assert "50 older letters are gone" in text and f"full with {most:,}" in text
        code, text = await asyncio.to_thread(run, url, "list", "--all")
        assert code == 0 and len(text.splitlines()) > most
