"""What is said when a swarm's hub does not answer: its remedy, not that of the node's server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.config import NodeConfig, load_config
from shared.contracts import subjects
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.transport.base import NotConnected, Transport
from tests.integration.page_swarm import PageSwarm
from tests.nats_server import NatsServer, free_port

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
HUB = "check the network on the way and the hub's server"


def configured(**nats: Any) -> NodeConfig:
    return load_config(overrides={"nats": nats, "tasks": [{"dataset": "gcd"}]})


async def lost(plane: Transport, server: NatsServer) -> str:
    """Return what a request says once the server is gone."""
    server.stop()
    with pytest.raises(NotConnected) as told:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await plane.stream_state(subjects.SWARM_ROLLOUTS)
    await plane.close()
    return str(told.value)


async def test_a_hub_that_never_answered_is_not_to_be_started_here() -> None:
    away = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(NotConnected) as told:
        await connect_swarm_plane(configured(swarm_url=away), "verifier", timeout_s=0.5)
    assert str(told.value).endswith(f": {HUB}, or set nats.swarm_url") and "swarm up" not in str(told.value)


async def test_one_server_for_both_planes_is_this_nodes_whichever_plane_is_asked() -> None:
    away = f"nats://127.0.0.1:{free_port()}"
    config = configured(node_url=away, swarm_url=away)
    for connecting in (connect_node_plane, connect_swarm_plane):
        with pytest.raises(NotConnected, match=r"start one with `swarm up` \(`make run`\), or set nats.node_url"):
            await connecting(config, "verifier", timeout_s=0.5)


async def test_a_hub_that_was_lost_is_not_to_be_restarted_here(nats_server: Callable[..., NatsServer]) -> None:
    hub = nats_server()
    plane = await connect_swarm_plane(configured(swarm_url=hub.url), "verifier", timeout_s=60.0)
    told = await lost(plane, hub)
    assert f"since the connection broke: if it stays away, {HUB}" in told and "swarm restart" not in told
    own = nats_server()
    node = await connect_node_plane(configured(node_url=own.url), "trainer", timeout_s=60.0)
    assert "if it stays away, start it again (`swarm restart nats` in a running swarm" in await lost(node, own)


def test_status_of_a_node_whose_hub_is_away_names_the_hubs_remedy(nats_server: Callable[..., NatsServer]) -> None:
    own, away = nats_server(), f"nats://127.0.0.1:{free_port()}"

    async def one_node() -> None:
        swarm = await PageSwarm.open(own.url)
        await swarm.node("alpha")
        await swarm.transport.close()

    asyncio.run(one_node())
    command = [sys.executable, "-m", "swarm_cli", "status", "--node-url", own.url, "--swarm-url", away]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT, env={**os.environ, "COLUMNS": "200"}, check=False
    )
    assert done.returncode == 0, done.stderr
    _, said = done.stdout.split("the swarm plane cannot be reached; nodes train alone until it is back\n")
    assert f"no NATS server answers at {away}" in said and f"{HUB}, or set nats.swarm_url" in said
    assert "swarm up" not in said and "node_url" not in said
