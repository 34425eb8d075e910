"""A swarm of two nodes and its NATS server, all real, for a Prometheus to scrape; and what is done
to it.

The server's exporter is the one thing that is not real: see `nats_exporter.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.verifier.sharing import Content, sign
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.wire import DEFAULT_SWARM_ID
from shared.identity.keys import SigningKey, new_seed
from shared.transport.connect import connect
from swarm_cli.installation import DEMO_CONFIG
from tests.e2e.processes import REPO, ROLES, NodeProcesses, wait_until
from tests.integration.running_verifier import group
from tests.monitoring.nats_exporter import NatsExporter
from tests.monitoring.prometheus_server import PrometheusServer
from tests.nats_server import NatsServer, free_port

RULES = REPO / "k8s" / "components" / "monitoring" / "rules" / "swarm.yaml"
START_S = 300.0
FLOOD = 4000
"""Messages that are signed and of tasks of their own: each takes one of the sender's turns."""
_AT_ONCE = 50
_END_S = 120.0
_WORKS_S, _RESTS_S = 0.1, 0.7
_CONFIG = """
[model]
threads = 1
[generator]
engine = "transformers"
completions = 4
groups_per_call = 4
max_new_tokens = 12
[eval]
tasks = 12
every_versions = 4
[verifier]
workers = 1
[sampler]
local = 2
external = 2
shortage = "fill_local"
shortage_wait_s = 5
[trainer]
learning_rate = 1e-4
checkpoint_every = 4
"""


@dataclass
class WatchedSwarm:
    """What runs, and where a Prometheus finds it."""

    nodes: tuple[NodeProcesses, ...]
    server: NatsServer
    jobs: dict[str, list[tuple[str, dict[str, str]]]]


@contextmanager
def watched_swarm(var: Path) -> Iterator[WatchedSwarm]:
    """Every process listens. `var`: for all that they write."""
    demo = DEMO_CONFIG.read_text()
    config = var / "test.toml"
    config.write_text(_CONFIG + demo[demo.index("[[tasks]]") :])
    monitor = free_port()
    server = NatsServer(var / "nats", config=f"server_name: nats-0\nhttp: 127.0.0.1:{monitor}").start()
    exporter = NatsExporter(f"http://127.0.0.1:{monitor}")
    settings = {
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__SWARM_URL": server.url,
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
    }
    nodes = tuple(NodeProcesses(name, "watched", var, settings, config).start() for name in ("alpha", "beta"))
    try:
        ports = {
            (node.node, role): wait_until(
                lambda node=node, role=role: _http_port(node, role),  # type: ignore[misc]
                *nodes,
                timeout_s=START_S,
                what=f"the port of {node.node}'s {role}",
            )
            for node in nodes
            for role in ROLES
        }
        targets = [(f"127.0.0.1:{port}", {"node": node, "role": role}) for (node, role), port in ports.items()]
        yield WatchedSwarm(nodes, server, {"swarm": targets, "nats": [(exporter.address, {})]})
    finally:
        for node in nodes:
            node.kill_all()
        exporter.close()
        server.kill()


@contextmanager
def unhurried(*nodes: NodeProcesses) -> Iterator[None]:
    """Let the generators work for an eighth of the time: whoever waits for a Prometheus needs a
    swarm that works, and not one that takes all of the machine.
    """
    over = threading.Event()

    def rest() -> None:
        while not over.wait(_WORKS_S):
            _signal(nodes, signal.SIGSTOP)
            over.wait(_RESTS_S)
            _signal(nodes, signal.SIGCONT)

    resting = threading.Thread(target=rest, daemon=True)
    resting.start()
    try:
        yield
    finally:
        over.set()
        resting.join(_END_S)


def _signal(nodes: tuple[NodeProcesses, ...], number: signal.Signals) -> None:
    for node in nodes:
        node.processes["generator"].send_signal(number)


def _http_port(node: NodeProcesses, role: str) -> int | None:
    log = node.run_dir / f"{role}.log"
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    started = [line for line in map(json.loads, whole.splitlines()) if line.get("event") == "started"]
    return int(started[-1]["http_port"]) if started else None


def firing(prometheus: PrometheusServer) -> set[tuple[str, str]]:
    """Alerts that fire, as (name, node)."""
    alerts = prometheus.ask("alerts")["alerts"]
    return {(each["labels"]["alertname"], each["labels"].get("node", "")) for each in alerts if each["state"] == "firing"}


@contextmanager
def flooding(url: str, swarm_id: str = DEFAULT_SWARM_ID, most: int = FLOOD) -> Iterator[list[int]]:
    """A stranger with a key of its own sends as fast as the server takes it, for the length of the
    block and at most `most` messages. Yields the numbers of those that were taken.
    """
    stopping, failed, sent = threading.Event(), list[BaseException](), list[int]()

    async def send() -> None:
        plane = await connect(url, name="mallory", timeout_s=30)
        key = SigningKey(new_seed())

        async def one(number: int) -> None:
            payload = encode(sign(group("mallory", number), key, Content("text"), swarm_id=swarm_id))
            await plane.publish(
                subjects.rollouts("mallory"), payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload)
            )
            sent.append(number)

        for first in range(0, most, _AT_ONCE):  # one after the other a server that syncs each would take too few
            if stopping.is_set():
                break
            await asyncio.gather(*map(one, range(first, min(most, first + _AT_ONCE))))
        await plane.close()

    def run() -> None:
        try:
            asyncio.run(send())
        except BaseException as error:  # told by the test's own thread
            failed.append(error)

    sender = threading.Thread(target=run, daemon=True)
    sender.start()
    try:
        yield sent
    finally:
        stopping.set()
        sender.join(_END_S)
    assert not sender.is_alive() and not failed, f"the flood broke off: {failed}"
