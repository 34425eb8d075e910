"""The page of a swarm with a Prometheus: one in which an alert fires at once, as alpha's trainer is
far from the policy that sampled, and one in which none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from shared.roles import ROLES, Role
from shared.runtime.health import HealthServer, Heartbeat
from tests.integration.page_looker import written
from tests.integration.page_swarm import Dashboard, PageSwarm
from tests.nats_server import NatsServer

ALERT = "SwarmPolicyDiverges"


@contextmanager
def page_with_alert(server: NatsServer, folder: Path) -> Iterator[Dashboard]:
    """The page, once it says that the swarm is running; with a Prometheus of its own."""
    registry = CollectorRegistry()
    Gauge("swarm_policy_version", "Version.", registry=registry).set(7)
    Gauge("swarm_trainer_kl_behaviour_nats", "Far from the policy that sampled.", registry=registry).set(2.0)
    with _page(server, folder, {"trainer": registry}, age_s=0.0) as shown:
        yield shown


@contextmanager
def page_with_processes(server: NatsServer, folder: Path) -> Iterator[Dashboard]:
    """The same of a node whose four processes answer, for an hour, and raise no alert."""
    with _page(server, folder, {role: CollectorRegistry() for role in ROLES}, age_s=-3600.0) as shown:
        yield shown


@contextmanager
def _page(server: NatsServer, folder: Path, registries: Mapping[Role, CollectorRegistry], age_s: float) -> Iterator[Dashboard]:
    processes = {role: HealthServer("127.0.0.1", 0, each, Heartbeat(), lambda: None) for role, each in registries.items()}

    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node("alpha", ports={role: process.port for role, process in processes.items()}, age_s=age_s)
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url, folder, "--patience", "0.1", prometheus=True)
    try:
        shown.until_state("running")
        yield shown
    finally:
        shown.close()
        for process in processes.values():
            process.close()
