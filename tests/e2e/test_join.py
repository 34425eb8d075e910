"""A newcomer joins by one line, from another network: two namespaces, a hub with a node that shares
in one of them, and nothing but a token in the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.status_figures import StatusFigure
from shared.transport.base import TransportError
from shared.transport.connect import connect
from swarm_cli.observe.view import NodeView, node_view
from swarm_cli.shipped import DEMO_CONFIG
from tests.e2e.processes import REPO, NodeProcesses
from tests.k8s.pod_network import PodNetwork
from tests.nats_server import find_binary

PROMISED_S = 120.0
"""From `swarm join` to the first foreign group accepted, on two cores that do nothing else."""
HUB_PORT = 4222
(HUB,) = re.findall(r"```\n(# hub.conf\n.*?)```", (REPO / "docs" / "joining.md").read_text(), flags=re.DOTALL)
"""The file that the page shows."""
POLL_S = 0.25

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Networks:
    """A hub's network and a newcomer's."""

    network: PodNetwork
    folder: Path
    hub_address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def hub_url(self) -> str:
        return f"nats://{self.hub_address}:{HUB_PORT}"

    def within(self, pod: str) -> list[str]:
        return ["ip", "netns", "exec", self.network.namespace(pod)]

    def start(self, pod: str, *command: str, log: Path, told: str = "") -> subprocess.Popen[bytes]:
        """A process of that network. `told`: its standard input."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
        settings = {"SWARM_NODE__VAR_DIR": str(self.folder / pod), "SWARM_EVAL__TASKS": "8", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*self.within(pod), *command], cwd=REPO, env=kept | settings, stdin=subprocess.PIPE, stdout=out, stderr=out
            )
        assert process.stdin is not None
        process.stdin.write(told.encode())
        process.stdin.close()
        self.started.append(process)
        return process

    def call(self, pod: str, *command: str) -> str:
        done = subprocess.run([*self.within(pod), *command], cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def view(self, pod: str, node: str) -> NodeView:
        """What a node says of itself on the server in its own network."""

        async def read() -> NodeView:
            plane = await connect(f"nats://127.0.0.1:{HUB_PORT}", name="test", timeout_s=5.0)
            try:
                return node_view(node, await plane.kv.all(subjects.node_bucket(node)))
            finally:
                await plane.close()

        try:
            return self.network.inside(pod, lambda: asyncio.run(read()))
        except TransportError:
            return node_view(node, [])


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[Networks]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip (Debian's package iproute2)")
    try:
        network = PodNetwork(f"join{os.getpid()}")
    except OSError as error:
        pytest.skip(f"this system makes no network namespaces: {error}")
    found: Networks | None = None
    try:
        found = Networks(network, tmp_path, network.add_pod("hub"))
        network.add_pod("newcomer")
        yield found
    finally:
        for process in found.started if found else []:
            if process.poll() is None:
                process.kill()
            process.wait(10)
        network.close()


def until(what: str, condition: Any, seconds: float, log: Path) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(POLL_S)
    raise AssertionError(f"not within {seconds:.0f} s: {what}\n{log.read_text()[-4000:] if log.exists() else ''}")


def test_a_newcomer_in_another_network_accepts_a_foreign_group_within_two_minutes(networks: Networks, tmp_path: Path) -> None:
    hub_log, join_log = tmp_path / "hub.log", tmp_path / "join.log"
    (tmp_path / "hub.conf").write_text(HUB.replace("hub-streams", str(tmp_path / "store")))
    networks.start("hub", find_binary(), "-c", str(tmp_path / "hub.conf"), log=hub_log)
    until("the hub listens", lambda: b"Server is ready" in hub_log.read_bytes(), 30.0, hub_log)
    environment = {
        "SWARM_NATS__NODE_URL": networks.hub_url,
        "SWARM_NATS__SWARM_URL": networks.hub_url,
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
        "SWARM_EVAL__TASKS": "0",
    }
    alpha = NodeProcesses("alpha", "test", tmp_path, environment, DEMO_CONFIG, within=networks.within("hub"))
    # A trainer would make more groups of better answers; what is shared of the base policy will do.
    alpha.start("generator", "verifier", "trainer")
    try:
        until(
            "alpha shares",
            lambda: alpha.check_alive() or networks.view("hub", "alpha").figure("verifier", StatusFigure.SHARED),
            240.0,
            tmp_path / "logs" / "alpha-generator.log",
        )
        token = networks.call("hub", sys.executable, "-m", "swarm_cli", "invite", "--url", networks.hub_url).strip()

        began = time.monotonic()
        joining = networks.start(
            "newcomer", sys.executable, "-m", "swarm_cli", "join", "-", "--name", "nova", log=join_log, told=token
        )

        def accepted() -> bool:
            assert joining.poll() is None, join_log.read_text()[-4000:]
            return networks.view("newcomer", "nova").figure("verifier", StatusFigure.ACCEPTED) > 0

        # Others share this machine: so much longer as there is more to run than cores.
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        until("nova accepts a group of alpha", accepted, PROMISED_S * min(busy, 4.0), join_log)
        print(f"first foreign group accepted {time.monotonic() - began:.1f} s after `swarm join`, load {busy:.1f} a core")

        told = join_log.read_text()
        assert [line.split()[1] for line in told.splitlines() if line.startswith("ok ")][:3] == ["connection", "clock", "name"], (
            told
        )
        seen = json.loads(networks.call("newcomer", sys.executable, "-m", "swarm_cli", "observe", networks.hub_url, "--json"))
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
