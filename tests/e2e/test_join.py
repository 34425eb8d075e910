"""A newcomer joins by one line, from another network: two namespaces, a hub with a node that shares
in one of them, and nothing but a token in the other.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts.status_figures import StatusFigure
from swarm_cli.installation import DEMO_CONFIG
from tests.e2e.networks import HUB_PORT, Networks, promised_s, two_networks, until
from tests.e2e.processes import REPO, NodeProcesses
from tests.nats_server import find_binary

(HUB,) = re.findall(r"```\n(# hub.conf\n.*?)```", (REPO / "docs" / "joining.md").read_text(), flags=re.DOTALL)
"""The file that the page shows."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.long]
"""`test_join_secured.py` does the same with more on its way: the wheel alone, keys and TLS."""


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[Networks]:
    with two_networks(tmp_path) as found:
        yield found


def test_a_newcomer_in_another_network_accepts_a_foreign_group_within_two_minutes(networks: Networks, tmp_path: Path) -> None:
    hub_url = f"nats://{networks.hub_address}:{HUB_PORT}"
    hub_log, join_log = tmp_path / "hub.log", tmp_path / "join.log"
    (tmp_path / "hub.conf").write_text(HUB.replace("hub-streams", str(tmp_path / "store")))
    networks.start("hub", find_binary(), "-c", str(tmp_path / "hub.conf"), log=hub_log)
    until("the hub listens", lambda: b"Server is ready" in hub_log.read_bytes(), 120, hub_log)
    environment = {
        "SWARM_NATS__NODE_URL": hub_url,
        "SWARM_NATS__SWARM_URL": hub_url,
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
        "SWARM_EVAL__TASKS": "0",
    }
    alpha = NodeProcesses("alpha", "test", tmp_path, environment, DEMO_CONFIG, network=networks.network.namespace("hub"))
    # A trainer would make more groups of better answers; what is shared of the base policy will do.
    alpha.start("generator", "verifier", "trainer")
    try:
        until(
            "alpha shares",
            lambda: alpha.check_alive() or networks.view("hub", "alpha").figure("verifier", StatusFigure.SHARED),
            240.0,
            tmp_path / "logs" / "alpha-generator.log",
        )
        token = networks.call("hub", sys.executable, "-m", "swarm_cli", "invite", "--url", hub_url).strip()

        began = time.monotonic()
        joining = networks.start(
            "newcomer", sys.executable, "-m", "swarm_cli", "join", "-", "--name", "nova", log=join_log, told=token
        )

        def accepted() -> bool:
            assert joining.poll() is None, join_log.read_text()[-4000:]
            return networks.view("newcomer", "nova").figure("verifier", StatusFigure.ACCEPTED) > 0

        until("nova accepts a group of alpha", accepted, promised_s(), join_log)
        print(f"first foreign group accepted {time.monotonic() - began:.1f} s after `swarm join`; load {os.getloadavg()[0]:.1f}")

        told = join_log.read_text()
        assert [line.split()[1] for line in told.splitlines() if line.startswith("ok ")][:3] == ["connection", "clock", "name"], (
            told
        )
        seen = json.loads(networks.call("newcomer", sys.executable, "-m", "swarm_cli", "status", "--url", hub_url, "--json"))
        shares = {node["node"]: node["shared"] for node in seen["nodes"]}
        assert shares["alpha"] > 0

        assert token.encode() not in Path(f"/proc/{joining.pid}/cmdline").read_bytes()
        joining.send_signal(signal.SIGINT)
        assert joining.wait(60) == 130, join_log.read_text()[-4000:]
        written = [file for file in (tmp_path / "newcomer").rglob("*") if file.is_file()]
        assert written and not [file for file in written if token.encode() in file.read_bytes()]
        kept = {file.name for file in (tmp_path / "newcomer" / "joined" / "swarm").iterdir()}
        assert kept == {"hub.json", "node.nk", "node.toml"}
    finally:
        alpha.kill_all()
