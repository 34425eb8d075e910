"""One meaning of "alive", in heartbeats, wherever it is asked."""

from __future__ import annotations

from typing import Any

import pytest

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import ServiceStatus
from shared.contracts.status_figures import MISSED_HEARTBEATS, SILENT_S, STATUS_INTERVAL_S, STOPPED, is_alive
from shared.runtime import health
from shared.transport.connect import connect
from swarm_cli.observe import snapshot
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.observe.status import as_object
from swarm_cli.target import Target
from tests.nats_server import own_server

NOW = 1_000_000.0


def status(heartbeats_ago: float, state: str = "training") -> ServiceStatus:
    return ServiceStatus(
        node="alpha",
        role="trainer",
        replica="0",
        pid=1,
        host="h",
        state=state,
        started_at=0.0,
        updated_at=NOW - heartbeats_ago * STATUS_INTERVAL_S,
        figures={},
    )


@pytest.mark.parametrize(
    ("heartbeats_ago", "said", "alive"),
    [
        (-1.0, "training", True),  # its clock is ahead
        (1.0, "training", True),
        (MISSED_HEARTBEATS / 2, "training", True),
        (MISSED_HEARTBEATS, "training", True),
        (MISSED_HEARTBEATS + 0.1, "training", False),
        (0.0, STOPPED, False),
    ],
)
def test_everything_that_shows_a_process_means_the_same_by_alive(heartbeats_ago: float, said: str, alive: bool) -> None:
    found = status(heartbeats_ago, said)
    node = NodeState("alpha", (found,), at=NOW)
    assert is_alive(found, NOW) is alive
    shown = as_object(SwarmState(NOW, (node,)))
    assert shown["nodes"]["alpha"]["services"]["trainer"][0]["alive"] is alive
    assert bool(node.alive("trainer")) is alive
    assert ("trainer" in node.words) is not alive


def test_a_process_that_is_taken_for_dead_is_one_whose_liveness_probe_fails() -> None:
    assert health.SILENT_S == SILENT_S == MISSED_HEARTBEATS * STATUS_INTERVAL_S


async def test_no_process_is_silent_for_the_time_that_the_rest_of_a_snapshot_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is made slow here, because a slow server cannot be had at will."""
    now, read_streams = NOW, snapshot._node_streams

    async def slowly(*arguments: Any) -> Any:
        nonlocal now
        now += 2 * SILENT_S
        return await read_streams(*arguments)

    monkeypatch.setattr(snapshot, "_node_streams", slowly)
    monkeypatch.setattr(snapshot.time, "time", lambda: now)
    server = own_server()
    plane = await connect(server.url, name="test")
    await plane.kv.ensure(subjects.node_bucket("alpha"))
    found = status(0.0)
    await plane.kv.put(subjects.node_bucket("alpha"), subjects.status_key("trainer", "0"), encode(found))
    taken = await snapshot.take_snapshot(
        NodeConfig(tasks=[{"dataset": "gcd"}]),  # type: ignore[list-item]
        Target(server.url, None),
        ["alpha"],
        timeout_s=5.0,
    )
    assert taken.at == NOW
    assert is_alive(found, taken.at)
