"""Faults as somebody who looks at the local page is told of them, with nothing made quicker:
`swarm up` and `swarm dashboard` as users run them.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_swarm import START_TIMEOUT_S, Swarm, free_port_range
from tests.monitoring.watched_swarm import flooding
from tests.nats_server import NatsServer, free_port

TOLD_S = 120.0
QUIET_S = 60.0
FLOODED = {("SwarmFlood", "alpha"), ("SwarmFlood", "beta")}
DOWN = ("NatsDown", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
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


@dataclass
class Shown:
    """A swarm as `swarm up` runs it, and the page of `swarm dashboard` on it."""

    swarm: Swarm
    up: subprocess.Popen[str]
    page: Page

    def told_s(self, alert: tuple[str, str], what: str) -> float:
        """Seconds until it fires."""
        return wait_until(lambda: alert in self.page.firing(), TOLD_S, f"{what} is told")

    def over(self, alert: tuple[str, str], what: str) -> None:
        wait_until(lambda: alert not in self.page.firing(), START_TIMEOUT_S, what)


@contextmanager
def shown_swarm(
    folder: Path, up: tuple[str, ...] = (), dashboard: tuple[str, ...] = (), port: int | None = None
) -> Iterator[Shown]:
    """Once the trainers' usual pace is known. up, dashboard: more arguments of the two commands;
    port: of a NATS server that `swarm up` does not start.
    """
    swarm, page_port = Swarm(folder), free_port_range()
    swarm.nats_port = port or swarm.nats_port
    page, url = Page(page_port), f"nats://127.0.0.1:{swarm.nats_port}"
    running = swarm.up("--no-progress", *up)
    watching: subprocess.Popen[str] | None = None
    try:
        wait_until(
            lambda: (swarm.status().get("nodes") or {}).get("alpha", {}).get("step", 0) > 20, START_TIMEOUT_S, "twenty steps"
        )
        arguments = ("--port", str(page_port), "--node-url", url, "--folder", str(folder / "watch"), *dashboard)
        watching = swarm._start("dashboard", *arguments)
        pace = 'node:swarm_trainer_step_duration_seconds:mean6h{node="alpha"}'
        wait_until(lambda: page.query(pace), START_TIMEOUT_S, "the usual pace of alpha's trainer")
        yield Shown(swarm, running, page)
    finally:
        for process in (running, watching):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=120)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with shown_swarm(tmp_path_factory.mktemp("told")) as found:
        yield found


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """It does not run for the length of the block, and is there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_flood_is_told_within_two_minutes(shown: Shown) -> None:
    assert not FLOODED & shown.page.firing()
    with flooding(f"nats://127.0.0.1:{shown.swarm.nats_port}", swarm_id="first", most=1_000_000) as sent:
        told_s = wait_until(lambda: FLOODED & shown.page.firing(), TOLD_S, "the flood is told")
    print(f"a flood: told after {told_s:.0f} s, in which {len(sent)} messages were sent")
    wait_until(lambda: not FLOODED & shown.page.firing(), START_TIMEOUT_S, "a flood that is over is told no more")


def test_a_stopped_trainer_is_told_within_two_minutes(shown: Shown) -> None:
    stalled = ("SwarmTrainerStalled", "alpha")
    assert stalled not in shown.page.firing()
    with stopped(pid_of(shown.swarm, "alpha", "trainer")):
        told_s = shown.told_s(stalled, "the stopped trainer")
        screen = shown.swarm.call("top", "alpha", "--once", "--node-url", f"nats://127.0.0.1:{shown.swarm.nats_port}").stdout
        print(f"a stopped trainer: told after {told_s:.0f} s\n{screen}")
        assert "trainer not answering for" in screen and "– steps/s" in screen and "compute" not in screen
        assert len(shown.page.get("expected.json")) == len(shown.page.query('up{job="swarm"}')) == 8
    shown.over(stalled, "it goes on")


def test_a_server_that_hangs_is_told_within_two_minutes(shown: Shown) -> None:
    assert DOWN not in shown.page.firing()
    (note,) = (shown.swarm.folder / "var" / "runs" / "first").glob("nats-server_*.ports")
    with stopped(int(note.stem.removeprefix("nats-server_"))):
        told_s = shown.told_s(DOWN, "the server that hangs")
        print(f"a server that hangs: told after {told_s:.0f} s")
    shown.over(DOWN, "it answers again")


def test_a_run_that_ended_in_order_leaves_no_alert(shown: Shown) -> None:
    shown.up.send_signal(signal.SIGINT)
    shown.up.communicate(timeout=120)
    wait_until(lambda: not shown.page.query("up") and not shown.page.firing(), QUIET_S, "nothing is watched, and nothing told")


def test_a_killed_server_is_told_within_two_minutes(tmp_path: Path) -> None:
    """Of `swarm up` with a server that it did not start: its own it starts again at once. The
    nodes tell it too, also where nobody knows the server's figures.
    """
    monitor = free_port()
    server = NatsServer(tmp_path / "nats", config=f"http: 127.0.0.1:{monitor}\nmax_payload: 8MB").start()
    told = {DOWN, *(("SwarmNatsDisconnected", node) for node in ("alpha", "beta"))}
    try:
        monitored = ("--nats-monitor", f"http://127.0.0.1:{monitor}")
        with shown_swarm(tmp_path, ("--nats-url", server.url), monitored, server.port) as shown:
            assert not told & shown.page.firing()
            server.kill()
            told_s = shown.told_s(DOWN, "the killed server")
            print(f"a killed server: told after {told_s:.0f} s")
            told_s += wait_until(lambda: told <= shown.page.firing(), TOLD_S - told_s, "by its nodes too")
            print(f"a killed server: told by its nodes after {told_s:.0f} s")
            server.start()
            wait_until(lambda: not told & shown.page.firing(), START_TIMEOUT_S, "it is back")
    finally:
        server.kill()
