"""Real service processes for end-to-end tests, killed as machines die. They are forked from a
process that has imported what they need (see `tests.forked`).
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.forked import Forked

ROLES = ("generator", "verifier", "sampler", "trainer")
REPO = Path(__file__).resolve().parents[2]
T = TypeVar("T")


class NodeProcesses:
    """The four services of one node, each a process of its own, with logs in files."""

    def __init__(self, node: str, run: str, var_dir: Path, environment: dict[str, str], config: Path, *, network: str = "") -> None:
        """`network`: the namespace in which the services run, by its name for `ip netns exec`."""
        self.node = node
        self.run_dir = var_dir / "runs" / run / node
        self._logs = var_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._network = network
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SWARM_")},
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "SWARM_NODE__ID": node,
            "SWARM_NODE__RUN": run,
            "SWARM_NODE__VAR_DIR": str(var_dir),
            "SWARM_HTTP__BASE_PORT": "0",
            "SWARM_LOG__FORMAT": "json",
            "SWARM_VERIFIER__WORKERS": "1",
            **environment,
        }
        self.processes: dict[str, Forked] = {}

    def start(self, *roles: str) -> NodeProcesses:
        """Start the named roles, all four by default."""
        for role in roles or ROLES:
            self.processes[role] = self._start(role, self._logs / f"{self.node}-{role}.log")
        return self

    def _start(self, role: str, log: Path) -> Forked:
        module, arguments = f"services.{role}", ["--config", str(self._config)]
        return Forked(module, arguments, environment=self._environment, cwd=REPO, log=log, network=self._network)

    def kill(self, role: str) -> None:
        """`kill -9`, as a machine dies."""
        self.processes[role].kill()
        self.processes[role].wait(10)

    def stop(self, role: str, timeout_s: float = 20.0) -> int:
        """SIGTERM; returns the exit code."""
        self.processes[role].send_signal(signal.SIGTERM)
        return self.processes[role].wait(timeout_s)

    def kill_all(self) -> None:
        """End everything that still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait(10)

    def log(self, role: str) -> str:
        """Return what a role has printed so far."""
        file = self._logs / f"{self.node}-{role}.log"
        return file.read_text() if file.exists() else ""

    def events(self, role: str, event: str) -> list[dict[str, Any]]:
        """Return what a role has written of `event` into its log in the run's folder."""
        return [line for line in _lines(self.run_dir / f"{role}.log") if line["event"] == event]

    def metrics(self, role: str) -> str:
        """Return what a role answers on `/metrics` now."""
        port = self.events(role, "started")[-1]["http_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def steps(self) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl`."""
        return _lines(self.run_dir / "metrics.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        """Lines of `eval.jsonl`."""
        return _lines(self.run_dir / "eval.jsonl")

    def check_alive(self) -> None:
        """Fail with the end of the log when a process has ended by itself."""
        for role, process in self.processes.items():
            code = process.poll()
            if code is not None and code != -signal.SIGKILL:
                raise AssertionError(f"{self.node} {role} ended with {code}:\n{self.log(role)[-4000:]}")


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    whole = file.read_text().rpartition("\n")[0]  # a line that is being written does not count yet
    return [json.loads(line) for line in whole.splitlines()]


def wait_until(condition: Callable[[], T | None], *nodes: NodeProcesses, timeout_s: float, what: str, poll_s: float = 0.2) -> T:
    """Poll until `condition` returns something true; fail with what was waited for and the ends of
    all logs.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for node in nodes:
            node.check_alive()
        found = condition()
        if found:
            return found
        time.sleep(poll_s)
    logs = "\n".join(f"--- {node.node} {role}\n{node.log(role)[-1500:]}" for node in nodes for role in ROLES)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{logs}")
