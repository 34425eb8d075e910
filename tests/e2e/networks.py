"""A hub's network and a newcomer's on one machine, and processes in them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.transport.base import TransportError
from shared.transport.connect import connect
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.snapshot import node_state
from tests.e2e.processes import REPO
from tests.k8s.pod_network import PodNetwork

PROMISED_S = 120.0
"""Until a newcomer's first foreign group is accepted, on two cores that do nothing else."""
HUB_PORT = 4222
POLL_S = 0.25


@dataclass
class Networks:
    """A hub's network and a newcomer's."""

    network: PodNetwork
    folder: Path
    hub_address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def within(self, pod: str) -> list[str]:
        return ["ip", "netns", "exec", self.network.namespace(pod)]

    def start(
        self, pod: str, *command: str, log: Path, told: str = "", cwd: Path = REPO, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A process of that network. `told`: its standard input; `environment`: in place of this
        process's.
        """
        kept = {name: value for name, value in (environment or os.environ).items() if not name.startswith("SWARM_")}
        settings = {"SWARM_NODE__VAR_DIR": str(self.folder / pod), "SWARM_EVAL__TASKS": "8", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*self.within(pod), *command], cwd=cwd, env=kept | settings, stdin=subprocess.PIPE, stdout=out, stderr=out
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

    def view(self, pod: str, node: str, port: int = HUB_PORT) -> NodeState:
        """Return what a node says of itself on the server at `port` in its own network."""

        async def read() -> NodeState:
            plane = await connect(f"nats://127.0.0.1:{port}", name="test", timeout_s=5.0)
            try:
                return node_state(node, (await plane.kv.newest(subjects.node_bucket(node), 1024))[0])
            finally:
                await plane.close()

        try:
            return self.network.inside(pod, lambda: asyncio.run(read()))
        except TransportError:
            return node_state(node, [])


@contextmanager
def two_networks(folder: Path) -> Iterator[Networks]:
    """The networks `hub` and `newcomer`. Skips where this system makes none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip (Debian's package iproute2)")
    try:
        network = PodNetwork(f"join{os.getpid()}")
    except OSError as error:
        pytest.skip(f"this system makes no network namespaces: {error}")
    found: Networks | None = None
    try:
        found = Networks(network, folder, network.add_pod("hub"))
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


def promised_s() -> float:
    """Others share this machine: so much longer as there is more to run than cores."""
    return PROMISED_S * min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 4.0)
