"""A hub that keeps more held-out scores than a viewer reads at a look, and a member that writes as
many as it can: what viewers see of the others, on a real server.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import nats

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport
from shared.contracts.streams import ensure_swarm_streams
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import sign_statement
from shared.transport.connect import connect
from swarm_cli.observe.evaluation_log import REPORTS_A_LOOK, EvaluationLog
from tests.nats_server import NatsServer

KEPT_OF_A_NODE = 1024
BUSY = [f"busy-{number}" for number in range(REPORTS_A_LOOK // KEPT_OF_A_NODE + 1)]
"""Together they have more scores on the hub than a viewer reads."""
KEYS = {name: SigningKey(new_seed()) for name in (*BUSY, "beta", "mallory")}


def score(node: str, version: int, rate: float) -> bytes:
    figures = {"n": 8, "pass_rate": rate, "mean_reward": rate, "per_task": {}, "seconds": 1.0}
    report = EvalReport(node=node, policy_version=version, created_at=time.time(), **figures)  # type: ignore[arg-type]
    return encode(sign_statement(report, KEYS[node], "swarm"))


async def test_a_member_that_writes_all_the_time_hides_no_others_scores(nats_server: Callable[..., NatsServer]) -> None:
    url = nats_server().url
    hub, writer = await connect(url, name="hub"), await nats.connect(url)
    await ensure_swarm_streams(hub)
    running = EvaluationLog(swarm="swarm")

    async def write(node: str, payload: bytes, times: int = 1) -> None:
        for _ in range(times - 1):
            await writer.publish(subjects.evals(node), payload)
        # This one is acknowledged: what a server has it stores in order, but later.
        await writer.jetstream(timeout=60).publish(subjects.evals(node), payload)

    for name in BUSY:
        await hub.kv.put(subjects.SWARM_NODES_BUCKET, name, b"here")
        await write(name, score(name, 1, 0.3), KEPT_OF_A_NODE)
    await write("beta", score("beta", 1, 0.2))
    await write("beta", score("beta", 2, 0.6))
    await running.follow(hub)
    await write("beta", score("beta", 3, 0.9))
    await write("mallory", score("mallory", 1, 1.0), REPORTS_A_LOOK + 100)
    kept = (await hub.ends(subjects.SWARM_EVALS)).messages
    assert kept == (len(BUSY) + 1) * KEPT_OF_A_NODE + 3, "more than a viewer reads, of which mallory's are few"
    fresh = EvaluationLog(swarm="swarm")
    for log in (running, fresh):
        await log.follow(hub)
        assert [each.pass_rate for each in log.reports("swarm") if each.node == "beta"] == [0.2, 0.6, 0.9]
        assert {each.node for each in log.reports("swarm")} == {"beta", "mallory", *BUSY}
    await writer.close()
    await hub.close()


async def test_scores_on_a_stream_that_was_made_anew_are_read_from_its_beginning(nats_server: Callable[..., NatsServer]) -> None:
    hub = await connect(nats_server().url, name="hub")
    anew = await connect(nats_server().url, name="anew")
    log = EvaluationLog(swarm="swarm")
    for plane, rates in ((hub, (0.1, 0.2, 0.3)), (anew, (0.4,))):
        await ensure_swarm_streams(plane)
        await log.follow(plane)
        assert len(log.reports("swarm")) == (0 if plane is hub else 3), "an empty stream does not make it forget"
        for version, rate in enumerate(rates):
            payload = score("beta", version, rate)
            await plane.publish(subjects.evals("beta"), payload, stream=subjects.SWARM_EVALS, message_id=f"v{version}")
        await log.follow(plane)
        assert [each.pass_rate for each in log.reports("swarm")] == list(rates)
        await plane.close() if plane is anew else None
    await hub.close()
