"""A hub that lets nobody in any more hides its own part of the swarm and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from shared.config import load_config
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import ServiceStatus
from shared.transport.connect import connect
from swarm_cli.dashboard.swarm_source import SwarmSource
from swarm_cli.target import Target
from tests.nats_server import NatsServer


async def test_the_page_shows_the_nodes_of_its_server_where_the_hub_refuses_its_key(
    nats_server: Callable[..., NatsServer], tmp_path: Path
) -> None:
    own, hub = nats_server(), nats_server(config="authorization { user: a, password: a }")
    plane = await connect(own.url, name="test")
    await plane.kv.ensure(subjects.node_bucket("alpha"))
    status = ServiceStatus(
        node="alpha", role="trainer", replica="0", state="training", updated_at=1.0, started_at=1.0, pid=1, host="h", figures={}
    )
    await plane.kv.put(subjects.node_bucket("alpha"), subjects.status_key("trainer", "0"), encode(status))
    await plane.close()
    config = load_config(overrides={"node": {"var_dir": tmp_path}, "tasks": [{"dataset": "gcd"}]})
    source = SwarmSource(config, Target(own.url, hub.url))
    for _ in range(2):
        async with asyncio.timeout(120):
            snapshot = await source.look()
        assert snapshot is not None and [node.node for node in snapshot.nodes] == ["alpha"]
        assert snapshot.swarm_reachable is False and "wants a key" in snapshot.swarm_problem
