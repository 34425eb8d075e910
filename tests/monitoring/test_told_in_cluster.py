"""Faults as somebody on call for a cluster is told of them, with nothing made quicker: the rules as
they are shipped, scraped as often as the components say and evaluated as often as a Prometheus does
that was told nothing, over real processes.

The short form, with the rules' patience scaled down, is in `test_real_prometheus.py`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import yaml

from tests.e2e.processes import REPO
from tests.monitoring.prometheus_server import PrometheusServer, prometheus_is_here
from tests.monitoring.watched_swarm import RULES, START_S, WatchedSwarm, firing, flooding, watched_swarm

TOLD_S = 300.0
QUIET_S = 150.0
"""Two evaluations of a Prometheus that was told nothing, and what a scrape may take."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not prometheus_is_here(), reason="no prometheus: scripts/test-packages installs Debian's"),
]


@dataclass
class OnCall:
    """The swarm, and what one is told of it."""

    swarm: WatchedSwarm
    prometheus: PrometheusServer

    def firing(self) -> set[tuple[str, str]]:
        """(name, node) of the alerts that fire, without the one that always does."""
        return firing(self.prometheus) - {("Watchdog", "")}

    def wait_until(self, condition: Callable[[], object], timeout_s: float, what: str) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s:.0f} s, but {self.firing()}"
            time.sleep(0.5)
        return time.monotonic() - began


def shipped_pace() -> dict[str, str]:
    """Return how often both components scrape. Nothing is said of evaluations: that is Prometheus's
    own default.
    """
    plain = yaml.safe_load((REPO / "k8s/components/monitoring-plain/scrape.yaml").read_text())
    monitors = yaml.safe_load_all((REPO / "k8s/components/monitoring/pod-monitors.yaml").read_text())
    ends = [end for monitor in monitors for end in monitor["spec"]["podMetricsEndpoints"]]
    (interval,) = {job["scrape_interval"] for job in plain["scrape_configs"]} | {end["interval"] for end in ends}
    (timeout,) = {end["scrapeTimeout"] for end in ends}
    return {"scrape_interval": interval, "scrape_timeout": timeout}


@pytest.fixture(scope="module")
def on_call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnCall]:
    """Once the trainers' usual pace is known, and a while in which nothing was told."""
    var = tmp_path_factory.mktemp("var")
    with watched_swarm(var) as swarm:
        prometheus = PrometheusServer(var / "prometheus", RULES, swarm.jobs, shipped_pace())
        try:
            prometheus.start()
            found = OnCall(swarm, prometheus)
            pace = "node:swarm_trainer_step_duration_seconds:mean6h"
            found.wait_until(lambda: len(prometheus.finite(pace)) == 2, START_S, "the usual pace of both trainers")
            time.sleep(QUIET_S)
            assert found.firing() == set(), "nothing is wrong yet"
            yield found
        finally:
            prometheus.kill()


def test_a_flood_of_a_stranger_is_told_within_five_minutes(on_call: OnCall) -> None:
    flooded = {("SwarmFlood", "alpha"), ("SwarmFlood", "beta")}
    with flooding(on_call.swarm.server.url, most=1_000_000) as sent:
        told_s = on_call.wait_until(lambda: flooded & on_call.firing(), TOLD_S, "the flood is told")
    print(f"a flood: told after {told_s:.0f} s, in which {len(sent)} messages were sent")


def test_a_stopped_trainer_is_told_within_five_minutes(on_call: OnCall) -> None:
    alpha, _ = on_call.swarm.nodes
    assert ("SwarmTrainerStalled", "alpha") not in on_call.firing()
    alpha.processes["trainer"].send_signal(signal.SIGSTOP)
    try:
        told_s = on_call.wait_until(
            lambda: ("SwarmTrainerStalled", "alpha") in on_call.firing(), TOLD_S, "the stopped trainer is told"
        )
        assert ("SwarmTrainerStalled", "beta") not in on_call.firing()
    finally:
        alpha.processes["trainer"].send_signal(signal.SIGCONT)
    print(f"a stopped trainer: told after {told_s:.0f} s")
    on_call.wait_until(lambda: ("SwarmTrainerStalled", "alpha") not in on_call.firing(), START_S, "it goes on")


def test_a_killed_server_is_told_within_five_minutes(on_call: OnCall) -> None:
    assert ("NatsDown", "") not in on_call.firing()
    on_call.swarm.server.kill()
    told_s = on_call.wait_until(lambda: ("NatsDown", "") in on_call.firing(), TOLD_S, "the killed server is told")
    print(f"a killed server: told after {told_s:.0f} s")
    on_call.swarm.server.start()
    on_call.wait_until(lambda: ("NatsDown", "") not in on_call.firing(), START_S, "it is back")
