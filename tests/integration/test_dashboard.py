"""`swarm dashboard` as `make watch` runs it: a real Prometheus that finds the processes a real NATS
server knows of.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import ServiceStatus
from shared.contracts.streams import ensure_node_streams
from shared.runtime.health import HealthServer, Heartbeat
from shared.transport.connect import connect
from tests.integration.local_swarm import free_port_range
from tests.nats_server import NatsServer, free_port

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on the PATH (Debian's package prometheus)"
)


@pytest.fixture
def processes() -> Iterator[dict[tuple[str, str], int]]:
    """Metrics servers as the services have them; their ports by node and role."""
    servers = {}
    for node, role in (("alpha", "trainer"), ("alpha", "verifier"), ("beta", "trainer")):
        registry = CollectorRegistry()
        Gauge("swarm_policy_version", "Version.", registry=registry).set(7)
        servers[node, role] = HealthServer("127.0.0.1", 0, registry, Heartbeat(), lambda: None)
    yield {key: server.port for key, server in servers.items()}
    for server in servers.values():
        server.close()


@pytest.fixture
def server(tmp_path: Path, processes: dict[tuple[str, str], int]) -> Iterator[NatsServer]:
    running = NatsServer(tmp_path / "nats").start()
    asyncio.run(_say(running.url, processes))
    yield running
    running.stop()


async def _say(url: str, processes: dict[tuple[str, str], int], pid: int = 1) -> None:
    transport = await connect(url, name="test", timeout_s=10)
    for node, role in processes:
        await ensure_node_streams(transport, node)
        now, port = time.time(), processes[node, role]
        status = ServiceStatus(
            node=node,
            role=role,  # type: ignore[arg-type]
            replica="0",
            pid=pid,
            host=socket.gethostname(),
            state="working",
            started_at=now,
            updated_at=now,
            figures={"http_port": port},
        )
        await transport.kv.put(subjects.node_bucket(node), subjects.status_key(role, "0"), encode(status))
    await transport.close()


def start(port: int, url: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    arguments = ["--port", str(port), "--node-url", url, "--folder", str(folder), *more]
    command = [sys.executable, "-m", "swarm_cli", "dashboard", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def query(port: int, expr: str) -> list[Any]:
    found: list[Any] = get(f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")["data"]["result"]
    return found


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode} before {what}: {process.communicate()}")
        try:
            if condition():
                return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    process.kill()
    pytest.fail(f"{what}: not within {DEADLINE_S:.0f} s: {process.communicate()}")


def assert_prometheus_answers_this_process_alone(port: int, folder: Path) -> None:
    """Whatever Host a browser sends after DNS rebinding, Prometheus does not look at it: so it
    talks to nobody without the key.
    """
    for host in ("evil.example", f"127.0.0.1:{port}"):
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        plain.request("GET", "/prometheus/api/v1/query?query=up", headers={"Host": host})
        answer = plain.getresponse()
        assert answer.status == 400 and b"swarm" not in answer.read()
    trusting = ssl.create_default_context(cafile=str(folder / "loopback.pem"))
    with pytest.raises(OSError):
        # TLS 1.3: the server's refusal comes with the first answer.
        urllib.request.urlopen(f"https://127.0.0.1:{port}/prometheus/-/ready", timeout=10, context=trusting)
    assert (folder / "loopback.key").stat().st_mode & 0o777 == 0o600
    trusting.load_cert_chain(folder / "loopback.pem", folder / "loopback.key")
    with urllib.request.urlopen(f"https://127.0.0.1:{port}/prometheus/-/ready", timeout=10, context=trusting) as answer:
        assert answer.status == 200


def assert_pages_are_passed_on_to_this_machine_alone(port: int) -> None:
    def ask(path: str, **headers: str) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path, headers={"Host": f"127.0.0.1:{port}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Location") or answer.headers["Content-Type"], answer.read()

    status, kind, body = ask("/prometheus/")
    for _ in range(5):
        if status not in (301, 302):
            break
        assert kind.startswith(("/prometheus/", f"http://127.0.0.1:{port}/prometheus/")), "a redirection stays behind this page"
        status, kind, body = ask(urllib.parse.urlsplit(kind).path)
    assert status == 200 and kind.startswith("text/html") and b"Prometheus" in body
    for path in ("/", "/panels.json", "/api/v1/query?query=up", "/prometheus/-/ready", "/prometheus/api/v1/status/config"):
        assert ask(path, Host=f"evil.example:{port}")[0] == 403
        assert ask(path, Origin="http://evil.example")[0] == 403
        assert ask(path, Origin=f"http://127.0.0.1:{port}")[0] == 200


def test_it_scrapes_every_process_serves_the_page_and_ends_what_it_started_and_nothing_else(
    server: NatsServer, processes: dict[tuple[str, str], int], tmp_path: Path
) -> None:
    port = free_port_range()
    process = start(port, server.url, tmp_path / "watch")

    def all_up() -> bool:
        return sum(series["value"][1] == "1" for series in query(port, 'up{job="swarm"}')) == len(processes)

    wait_until(all_up, process, "all processes are scraped")
    found = {
        (series["metric"]["node"], series["metric"]["role"]): series["metric"]["instance"]
        for series in query(port, "swarm_policy_version == 7")
    }
    assert found == {key: f"127.0.0.1:{at}" for key, at in processes.items()}
    assert {dashboard["uid"] for dashboard in get(f"http://127.0.0.1:{port}/panels.json")["dashboards"]} == {
        "swarm-overview",
        "swarm-node",
    }
    rules = get(f"http://127.0.0.1:{port}/prometheus/api/v1/rules")["data"]["groups"]
    alerts = {rule["name"] for group in rules for rule in group["rules"] if rule["type"] == "alerting"}
    assert {"SwarmTrainerStalled", "SwarmRejectSpike"} <= alerts, "the cluster's rules are not loaded"

    assert_prometheus_answers_this_process_alone(port + 1, tmp_path / "watch")
    assert_pages_are_passed_on_to_this_machine_alone(port)

    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    assert f"open http://127.0.0.1:{port}/" in said and "scraping 3 processes of 2 nodes (alpha, beta)" in said
    for closed in (port, port + 1):
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", closed), 1):
            pass
    os.kill(server.pid, 0)  # the swarm's server lives on


def test_it_waits_for_a_swarm_that_is_not_there_and_names_a_taken_port(tmp_path: Path) -> None:
    port = free_port_range()
    process = start(port, "nats://127.0.0.1:9", tmp_path / "watch")
    wait_until(lambda: bool(get(f"http://127.0.0.1:{port}/panels.json")), process, "the page is there")
    second = start(port, "nats://127.0.0.1:9", tmp_path / "second")
    _, said = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 1
    assert f"port {port}, needed for the page, is taken" in said and f"port {port + 1}, needed for Prometheus" in said
    assert "--port" in said and "Traceback" not in said
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0 and "no swarm answers at nats://127.0.0.1:9" in said and "make run" in said


def test_a_server_that_hangs_is_told_and_a_run_that_is_over_leaves_no_alert(
    processes: dict[tuple[str, str], int], tmp_path: Path
) -> None:
    monitor, port = free_port(), free_port_range()
    server = NatsServer(tmp_path / "nats", config=f"http: 127.0.0.1:{monitor}").start()
    alive = subprocess.Popen(["sleep", "600"])  # stands for the processes, of which the metrics are served here
    asyncio.run(_say(server.url, processes, alive.pid))
    process = start(port, server.url, tmp_path / "watch", "--nats-monitor", f"http://127.0.0.1:{monitor}", "--patience", "0.02")

    def firing() -> set[str]:
        alerts = get(f"http://127.0.0.1:{port}/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"} - {"Watchdog"}

    def targets() -> list[Any]:
        return query(port, "up")

    try:
        wait_until(lambda: bool(query(port, "nats_stream_total_messages")), process, "the server's figures are scraped")
        assert len(get(f"http://127.0.0.1:{port}/expected.json")) == 2 * 4, "of each node all four roles"
        wait_until(lambda: len(targets()) == len(processes) + 1, process, "every process and the server are targets")
        assert "NatsDown" not in firing()
        os.kill(server.pid, signal.SIGSTOP)
        wait_until(lambda: "NatsDown" in firing(), process, "the server that hangs is told")
        assert len(targets()) == len(processes) + 1, "what does not answer stays a target"
        alive.kill()
        alive.wait(10)
        server.kill()
        wait_until(lambda: not targets(), process, "a run of which nothing is left has no targets")
        wait_until(lambda: not firing(), process, "and leaves no alert")
        assert get(f"http://127.0.0.1:{port}/expected.json") == []
    finally:
        alive.kill()
        server.kill()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=180)
