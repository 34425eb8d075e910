"""The page of a swarm in which one alert fires at once: alpha's trainer is far from the policy that
sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

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
    trainer = HealthServer("127.0.0.1", 0, registry, Heartbeat(), lambda: None)

    async def write() -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node("alpha", trainer_port=trainer.port)
        await swarm.transport.close()

    written(write())
    shown = Dashboard(server.url, folder, "--patience", "0.1", prometheus=True)
    try:
        shown.until_state("running")
        yield shown
    finally:
        shown.close()
        trainer.close()
