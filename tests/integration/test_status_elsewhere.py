"""`swarm status` shows the held-out score of a node on another server: the one that it signed."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from shared.identity.keys import SigningKey, new_seed
from tests import forked
from tests.integration.page_swarm import PageSwarm
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0


async def _two_nodes(url: str) -> None:
    swarm = await PageSwarm.open(url)
    await swarm.node("alpha")
    await swarm.node("beta", here=False)
    for version, rate in ((0, 0.125), (25, 0.625)):
        await swarm.score(swarm.report("beta", version, rate))
    await swarm.score(swarm.report("beta", 26, 0.999), SigningKey(new_seed()))  # another key takes the name
    await swarm.score(swarm.report("alpha", 3, 0.5))
    await swarm.transport.close()


def _status(server: NatsServer, *arguments: str) -> str:
    environment = {**os.environ, "COLUMNS": "200"}
    asked = ("status", "--node-url", server.url, *arguments)
    done = forked.run("swarm_cli", asked, environment=environment, cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_score_of_a_node_on_another_server_is_the_newest_that_it_signed(server: NatsServer) -> None:
    asyncio.run(_two_nodes(server.url))
    (line,) = (line for line in _status(server).splitlines() if "beta" in line)
    assert "0.625/200" in line and "+0.500" in line
    nodes = json.loads(_status(server, "--json"))["nodes"]
    evaluation = {"policy_version": 25, "pass_rate": 0.625, "mean_reward": 0.625, "n": 200, "unknown": 0}
    assert nodes["beta"]["evaluation"] == evaluation
    assert nodes["alpha"]["evaluation"]["policy_version"] == 3, "what it signed counts for a node here too"
