"""One role's key floods its node's bucket: what it may write is bounded, the other processes work
on, displays say so and take nobody for gone, and the operator's remedy ends it.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from services.verifier.border import Refusal
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import (
    MAX_DELTAS,
    DrawLease,
    EvalReport,
    PolicyDelta,
    PolicyFile,
    PolicyPointer,
    ServiceStatus,
    TaskLedger,
    TaskScore,
    TrainerPosition,
)
from shared.contracts.limits import MIB, NODE_LIMITS
from shared.contracts.senders import MAX_REPUTATIONS, Ban, BanList, KeyReputation, ReputationState
from shared.contracts.status_figures import StatusFigure
from shared.contracts.streams import ensure_node_streams
from shared.roles import ROLES
from shared.runtime.planes import connect_node_plane
from shared.runtime.status import StatusBoard
from shared.transport.base import NotConnected, Transport, bucket_stream
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.progress import row_lines
from swarm_cli.observe.snapshot import PROCESSES_READ, gather, take_snapshot
from swarm_cli.target import Target
from tests.integration.nats_users import raw, refused_of
from tests.integration.running_verifier import until
from tests.nats_server import own_plane
from tests.secured_server import SecuredServer, swarm

pytestmark = pytest.mark.slow

BUCKET = subjects.node_bucket("alpha")
STREAM = bucket_stream(BUCKET)
FLOOD = {50_000: 3_000, 1_000: 100, 1: 1_000}
"""Bytes of a value, and keys that it is written to: the last take what room is left."""


def a_status(role: Any, replica: str, updated_at: float = 0.0) -> bytes:
    return encode(
        ServiceStatus(
            node="alpha", role=role, replica=replica, pid=1, host="h", state="working", started_at=time.time() - 300,
            updated_at=updated_at or time.time(), figures={StatusFigure.GROUPS_GENERATED: 1.0},
        )
    )  # fmt: skip


async def well(plane: Transport, *roles: Any) -> None:
    """Write what a node's processes write, all of it honest."""
    for role in roles or ROLES:
        await plane.kv.put(BUCKET, subjects.status_key(role, "0"), a_status(role, "0"))
    if not roles:
        await plane.kv.put(BUCKET, subjects.TRAINER_KEY, encode(TrainerPosition(policy_version=7, consumed_local=1)))


async def test_a_role_that_floods_its_nodes_bucket_fills_a_bounded_part_and_hides_no_other_role(tmp_path: Path) -> None:
    server = SecuredServer(tmp_path, ["alpha"])
    server.start()
    try:
        config = server.config("alpha", tmp_path)
        await asyncio.to_thread(server.init, "node", config)
        planes = {role: await connect_node_plane(config, role) for role in (*ROLES, "operator")}
        for role in ROLES:
            for _ in range(NODE_LIMITS.state_history):
                await StatusBoard("alpha", role, "0").report_once(planes[role])
        await planes["trainer"].kv.put(BUCKET, subjects.TRAINER_KEY, encode(TrainerPosition(policy_version=7, consumed_local=1)))

        errors: list[str] = []
        for role in ("sampler", "trainer"):
            client = await raw(server, server.keys / "alpha" / f"{role}.nk", f"_INBOX_alpha.{role}", errors)
            more = [f"$KV.{BUCKET}.status.{role}.{name}" for name in ("1", "999999", "pod-0")]
            assert await refused_of(client, errors, more, subscribe=False) == set(more)
            await client.close()

        client = await raw(server, server.keys / "alpha" / "generator.nk", "_INBOX_alpha.generator", errors)
        answer = await client.request(f"$KV.{BUCKET}.status.generator.huge", bytes(2 * MIB), timeout=30.0)
        assert "maximum" in json.loads(answer.data)["error"]["description"]
        for size, keys in FLOOD.items():
            for number in range(keys):
                await client.publish(f"$KV.{BUCKET}.status.generator.f{size}-{number}", bytes(size))
                if number % 100 == 0:
                    await client.flush(timeout=60)
        await client.flush(timeout=60)
        await client.close()
        size = (await planes["operator"].stream_state(STREAM)).size_bytes
        assert size is not None and NODE_LIMITS.state_max_bytes * 0.9 < size <= NODE_LIMITS.state_max_bytes

        for role in ROLES:  # a process that runs goes on, and one that is new is told
            await StatusBoard("alpha", role, "0").report_once(planes[role])
        with capture_logs() as logs:
            telling = asyncio.create_task(
                StatusBoard("alpha", "verifier", "new").report(planes["verifier"], structlog.get_logger())
            )
            await until(lambda: any(line["event"] == "status_refused" for line in logs))
            await cancel_and_wait(telling)
        assert "purge" in next(line["reason"] for line in logs if line["event"] == "status_refused")

        (node,) = await looked_at(config, planes["operator"])
        assert [role for role in ROLES if node.alive(role)] == list(ROLES) and node.kind == "running" and node.step == 7
        assert node.surplus.keys() == {"status.generator"} and node.surplus["status.generator"] > 2_000
        shown = await asyncio.to_thread(swarm, "status", "alpha", environment=environment(server, tmp_path))
        remedy = f"nats stream purge {STREAM} --subject '$KV.{BUCKET}.status.generator.*'"
        assert remedy in shown and "no word from" not in shown

        # What that command asks of the server.
        request = json.dumps({"filter": f"$KV.{BUCKET}.status.generator.*"}).encode()
        operator = await raw(server, server.keys / "alpha" / "operator.nk", "_INBOX", errors)
        assert json.loads((await operator.request(f"$JS.API.STREAM.PURGE.{STREAM}", request, timeout=60.0)).data)["success"]
        await operator.close()
        for role in ("generator", "verifier"):
            await StatusBoard("alpha", role, "0").report_once(planes[role])
        (node,) = await looked_at(config, planes["operator"])
        assert not node.surplus and [role for role in ROLES if node.alive(role)] == list(ROLES)
        for plane in planes.values():
            await plane.close()
    finally:
        server.stop()


async def looked_at(config: NodeConfig, operator: Transport) -> tuple[NodeState, ...]:
    assert operator.connected
    return (await take_snapshot(config, Target(config.nats.node_url, None), ["alpha"], timeout_s=10.0)).nodes


def environment(server: SecuredServer, folder: Path) -> dict[str, str]:
    return {
        "SWARM_NODE__ID": "alpha",
        "SWARM_NODE__VAR_DIR": str(folder),
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__NODE_KEY_FILE": str(server.keys / "{node}" / "{role}.nk"),
        "SWARM_NATS__NODE_CA_FILE": str(server.ca_file),
    }


async def test_a_role_whose_processes_no_longer_fit_into_a_look_is_unknown_and_not_gone() -> None:
    """The flood goes on, so none of what is read is the real process's."""
    plane = await own_plane()
    await ensure_node_streams(plane, "alpha")
    await well(plane)
    await asyncio.gather(*(plane.kv.put(BUCKET, f"status.generator.f{number}", b"junk") for number in range(1_100)))
    (node,) = await gather(plane, ["alpha"])
    assert node.unknown == ["generator"] and node.gone == [] and node.missing == []
    assert node.kind == "unread" and node.health == "warn" and not node.ended and node.step == 7
    assert "generator" in node.words and node.role_words("generator") == "not known"
    assert node.surplus == {"status.generator": 1_101 - PROCESSES_READ}
    assert row_lines(node, 1.0)
    await well(plane, "generator")
    (node,) = await gather(plane, ["alpha"])
    assert node.unknown == [] and node.kind == "running"


async def test_the_newest_of_many_processes_that_ended_are_those_that_run() -> None:
    """A pod's name does not come again, so a node's bucket fills with those that ended."""
    plane = await own_plane()
    await ensure_node_streams(plane, "alpha")
    ended = [f"pod-{number}" for number in range(PROCESSES_READ + 5)]
    for name in ended:
        await plane.kv.put(BUCKET, subjects.status_key("generator", name), a_status("generator", name, 1.0))
    await well(plane)
    (node,) = await gather(plane, ["alpha"])
    assert [status.replica for status in node.alive("generator")] == ["0"]
    assert node.surplus == {"status.generator": 6} and len(node.crowding) == 1 and node.kind == "running"


async def test_a_bucket_that_cannot_be_read_makes_its_node_unread_and_not_gone() -> None:
    plane = await own_plane()
    await ensure_node_streams(plane, "alpha")
    await well(plane)
    alpha, beta = await gather(plane, ["alpha", "beta"])
    assert alpha.kind == "running"
    assert bucket_stream("node_beta") in beta.unread and beta.kind == "unread" and beta.health == "warn"
    assert beta.missing == beta.gone == [] and not beta.ended and not beta.left_by_another_run("another")
    assert not any(beta.starting(role) for role in ROLES)
    with pytest.raises(NotConnected):
        await gather(plane, ["beta"])


@pytest.mark.parametrize("replica", ["999999", "10000", "x" * 64, "a_b"])
async def test_a_status_of_a_replica_that_no_configuration_may_name_is_told_and_not_believed(replica: str) -> None:
    with pytest.raises(ValueError, match="replica"):
        NodeConfig(node={"replica": replica}, tasks=[{"dataset": "gcd"}])
    plane = await own_plane()
    await ensure_node_streams(plane, "alpha")
    await well(plane)
    await plane.kv.put(BUCKET, subjects.status_key("generator", replica), a_status("generator", replica))
    (node,) = await gather(plane, ["alpha"])
    assert node.unreadable == (subjects.status_key("generator", replica),)
    assert [status.replica for status in node.alive("generator")] == ["0"]


def test_the_largest_honest_values_fit_the_bucket() -> None:
    now, digest, key = time.time(), "a" * 64, f"U{'A' * 55}"
    part = PolicyFile(version=2**40, sha256=digest, size_bytes=2**40, uri="u" * 2048)
    pointer = PolicyPointer(
        version=2**40, sha256=digest, size_bytes=2**40, uri="u" * 2048, consumed_local=2**40, created_at=now, anchor=part,
        deltas=[PolicyDelta(file=part, makes=digest)] * MAX_DELTAS,
    )  # fmt: skip
    leases = [DrawLease(first=2**40, count=65_536, replica="r" * 63, expires_at=now)] * 4096
    reputation = KeyReputation(
        public_key=key, name="n" * 32, suspicion=0.5, updated_at=now, accepted=2**40, quarantined_until=now, quarantine_s=1.0,
        refused=dict.fromkeys((offence.value for offence in Refusal if offence.blame), 2**40),
    )  # fmt: skip
    score = TaskScore(n=10, pass_rate=0.5, mean_reward=0.5)
    report = EvalReport(
        node="n" * 32, policy_version=2**40, created_at=now, n=10, pass_rate=0.5, mean_reward=0.5, seconds=1.0, held_out=digest,
        scorer=digest, pass_rule=digest, per_task={f"d{number:062d}": score for number in range(1024)},
        reward_values={f"{number:0512d}": [0.1, 0.2, 0.3] for number in range(64)},
    )  # fmt: skip
    status = ServiceStatus(
        node="n" * 32, role="generator", replica="r" * 63, pid=2**22, host="h" * 64, state="s" * 512, started_at=now,
        updated_at=now, figures={f"{number:064d}": 1.0 for number in range(64)},
    )  # fmt: skip
    values = (
        pointer, TaskLedger(next_draw=2**40, leases=leases, secret=bytes(64)), ReputationState(keys=[reputation] * MAX_REPUTATIONS),
        report, status, BanList(bans=[Ban(sender=key, until=now, reason="x" * 120, made_at=now)] * 4000),
    )  # fmt: skip
    sizes = [len(encode(value)) for value in values]
    assert max(sizes) <= NODE_LIMITS.state_value_max_bytes
    assert sum(sizes) * NODE_LIMITS.state_history <= NODE_LIMITS.state_max_bytes / 4
