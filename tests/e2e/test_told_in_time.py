"""A stopped trainer as somebody on call sees it, with nothing made quicker: `swarm up` and
`swarm dashboard` as users run them.

The short form, with the rules' patience scaled down, is in
`tests/monitoring/test_real_prometheus.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_swarm import START_TIMEOUT_S, Swarm, free_port_range

TOLD_S = 120.0
QUIET_S = 60.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on the PATH (Debian's package prometheus)"),
]


class Page:
    """What the local page asks its own server."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self._base}/{path}", timeout=10) as answer:
                return json.load(answer)
        except (urllib.error.URLError, OSError):
            return None

    def query(self, expr: str) -> list[Any]:
        found = self.get(f"api/v1/query?{urllib.parse.urlencode({'query': expr})}")
        return found["data"]["result"] if found else []

    def firing(self) -> set[tuple[str, str]]:
        """(name, node) of the alerts that fire, without the one that always does."""
        found = self.get("api/v1/alerts")
        alerts = found["data"]["alerts"] if found else []
        return {
            (each["labels"]["alertname"], each["labels"].get("node", ""))
            for each in alerts
            if each["state"] == "firing" and each["labels"]["severity"] != "none"
        }


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(1.0)
    return time.monotonic() - began


def pid_of(swarm: Swarm, node: str, role: str) -> int:
    log = (swarm.node_dir(node) / f"{role}.log").read_text().splitlines()
    started = [line for line in map(json.loads, log) if line.get("event") == "started"]
    return int(started[-1]["pid"])


def steps_of(swarm: Swarm, node: str) -> int:
    nodes: dict[str, Any] = swarm.status().get("nodes") or {}
    return int(nodes[node]["step"]) if node in nodes else 0


def test_a_stopped_trainer_is_told_within_two_minutes_and_an_ended_run_leaves_nothing(tmp_path: Path) -> None:
    swarm, port = Swarm(tmp_path), free_port_range()
    page, url = Page(port), f"nats://127.0.0.1:{swarm.nats_port}"
    running = swarm.up("--no-progress")
    watching: subprocess.Popen[str] | None = None
    trainer = 0
    try:
        wait_until(
            lambda: (swarm.status().get("nodes") or {}).get("alpha", {}).get("step", 0) > 20, START_TIMEOUT_S, "twenty steps"
        )
        watching = swarm._start("dashboard", "--port", str(port), "--node-url", url, "--folder", str(tmp_path / "watch"))
        pace = 'node:swarm_trainer_step_duration_seconds:mean6h{node="alpha"}'
        wait_until(lambda: page.query(pace), START_TIMEOUT_S, "the usual pace of alpha's trainer")
        assert ("SwarmTrainerStalled", "alpha") not in page.firing()

        trainer = pid_of(swarm, "alpha", "trainer")
        os.kill(trainer, signal.SIGSTOP)
        told_s = wait_until(lambda: ("SwarmTrainerStalled", "alpha") in page.firing(), TOLD_S, "the stopped trainer is told")
        screen = swarm.call("top", "alpha", "--once", "--node-url", url).stdout
        print(f"told after {told_s:.0f} s\n{screen}")
        assert "trainer silent for" in screen and "– steps/s" in screen and "compute" not in screen
        assert len(page.get("expected.json")) == len(page.query('up{job="swarm"}')) == 8

        os.kill(trainer, signal.SIGCONT)
        trainer = 0
        wait_until(lambda: ("SwarmTrainerStalled", "alpha") not in page.firing(), START_TIMEOUT_S, "it goes on")
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=120)
        wait_until(lambda: not page.query("up") and not page.firing(), QUIET_S, "a run that ended in order leaves no alert")
    finally:
        if trainer:
            os.kill(trainer, signal.SIGCONT)
        for process in (running, watching):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=120)
