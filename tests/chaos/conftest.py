"""One node of real service processes between two real servers, which all tests of
`test_chaos_node.py` hurt one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.config import load_config
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.transport.connect import connect
from swarm_cli.installation import DEMO_CONFIG
from tests.chaos.observer import Observer
from tests.chaos.peer import Peer
from tests.chaos.scale import SCALE
from tests.chaos.servers import ShippedServer
from tests.constants import as_variable
from tests.e2e.processes import REPO, NodeProcesses, wait_until
from tests.nats_server import NatsServer

START_S = 180.0
# In a full run a step takes longer, so that the batches of half an hour can be trained again.
GROUPS, COMPLETIONS = (4, 8) if SCALE.name == "full" else (2, 4)
CONFIG = f"""
[model]
threads = 1
[generator]
engine = "transformers"
completions = {COMPLETIONS}
groups_per_call = 2
max_new_tokens = 12
[eval]
tasks = 8
every_versions = 100000
[verifier]
[sampler]
local = {GROUPS}
external = 1
shortage = "fill_local"
shortage_wait_s = 0.5
[trainer]
learning_rate = 1e-4
checkpoint_every = 5
# Peers' texts are made up here, and no policy would find them likely.
constants.policy_check_fraction = 0.0
[nats]
connect_timeout_s = 60
"""


@dataclass
class Wounded:
    """A node, its server, the swarm's server, and those who watch."""

    server: NatsServer
    swarm_server: NatsServer
    node: NodeProcesses
    observer: Observer
    swarm: Observer
    peer: Peer
    config: Path
    var: Path

    @property
    def step(self) -> int:
        """Steps on disk."""
        lines = self.node.steps()
        return int(lines[-1]["step"]) if lines else 0

    def until_step(self, step: int, timeout_s: float = 120.0) -> float:
        """Wait for a step; returns the seconds."""
        started = time.monotonic()
        wait_until(lambda: self.step >= step, self.node, timeout_s=timeout_s, what=f"step {step}")
        return time.monotonic() - started


def prepare(url: str, *, swarm: bool) -> None:
    """Make the streams before anybody watches them."""

    async def ensure() -> None:
        transport = await connect(url, name="prepare")
        if swarm:
            await ensure_swarm_streams(transport)
        else:
            await ensure_node_streams(transport, "alpha")
        await transport.close()

    asyncio.run(ensure())


@pytest.fixture(scope="module")
def wounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wounded]:
    var = tmp_path_factory.mktemp("chaos")
    demo = DEMO_CONFIG.read_text()
    config = var / "node.toml"
    config.write_text(CONFIG + demo[demo.index("[[tasks]]") :])
    server, swarm_server = ShippedServer(var / "nats").start(), ShippedServer(var / "swarm").start()
    prepare(server.url, swarm=False)
    prepare(swarm_server.url, swarm=True)
    environment = {
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__SWARM_URL": swarm_server.url,
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
        **as_variable(verifier={"ack_wait_s": 10.0, "intake_poll_s": 0.2}),
    }
    node = NodeProcesses("alpha", "chaos", var, environment, config)
    observer, swarm = Observer(server.url, "alpha"), Observer(swarm_server.url, "alpha")
    peer = Peer("beta", swarm, list(load_config(config).tasks))
    made = Wounded(server, swarm_server, node.start(), observer, swarm, peer, config, var)
    try:
        made.until_step(2, START_S)
        yield made
    finally:
        peer.stop()
        node.kill_all()
        observer.close()
        swarm.close()
        server.kill()
        swarm_server.kill()
