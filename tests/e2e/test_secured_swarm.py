"""Two whole nodes on a server with TLS, keys and an account for each user: they train, share, and
are refused nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from swarm_cli.installation import DEMO_CONFIG
from tests.e2e.processes import REPO, NodeProcesses, wait_until
from tests.e2e.test_swarm import CONFIG
from tests.secured_server import SecuredServer

STEPS = 5
MOST_STEPS = 2000
WITHIN_S = 400.0


def test_two_nodes_train_and_share_on_a_secured_server_without_one_refusal(tmp_path: Path) -> None:
    """Policies go through NATS, so that the trainer's and the generator's whole work is in it,
    steering and held-out scores too.
    """
    demo = DEMO_CONFIG.read_text()
    config = tmp_path / "test.toml"
    config.write_text(CONFIG.format(steps=MOST_STEPS) + demo[demo.index("[[tasks]]") :])
    server = SecuredServer(tmp_path / "nats", ["alpha", "beta"])
    server.start()
    for name in server.nodes:
        server.init("node", server.config(name, tmp_path))
    server.init("swarm", server.config("alpha", tmp_path))
    environment = {
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__SWARM_URL": server.url,
        "SWARM_NATS__NODE_KEY_FILE": str(server.keys / "{node}" / "{role}.nk"),
        "SWARM_NATS__SWARM_KEY_FILE": str(server.keys / "{node}" / "swarm.nk"),
        "SWARM_NATS__NODE_CA_FILE": str(server.ca_file),
        "SWARM_NATS__SWARM_CA_FILE": str(server.ca_file),
        "SWARM_NATS__CREATE_STREAMS": "false",
        "SWARM_POLICY_STORE__URI": "nats://",
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
    }
    nodes = [NodeProcesses(name, "test", tmp_path, environment, config).start() for name in server.nodes]
    try:
        for node in nodes:
            wait_until(
                # The first to be ready trains alone until another has something to share.
                lambda node=node: (  # type: ignore[misc]
                    len(node.steps()) >= STEPS and any(step["groups_external"] for step in node.steps())
                ),
                *nodes,
                timeout_s=WITHIN_S,
                what=f"{STEPS} steps of {node.node}, one of them with foreign groups",
            )
            versions = {
                json.loads(line)["policy_version"] for line in node.log("generator").splitlines() if "policy_version" in line
            }
            assert len(versions) > 1, "the generator has taken new policies"
        for node in nodes:
            for role in node.processes:
                assert node.stop(role, timeout_s=120.0) == 0, node.log(role)[-2000:]
        assert server.violations() == []
    finally:
        for node in nodes:
            node.kill_all()
        server.stop()
