"""Dashboards and rules before a real Prometheus that scrapes a real running swarm of two nodes, and
its real NATS server.

The server's exporter is the one thing that is not real: see `nats_exporter.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from monitoring.dashboards import DASHBOARDS
from monitoring.panels import Panel, substituted
from monitoring.render import rule_file
from services.verifier.sharing_rules import sign
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.identity.keys import SigningKey, new_seed
from shared.transport.connect import connect
from swarm_cli.shipped import DEMO_CONFIG
from tests.e2e.processes import REPO, ROLES, NodeProcesses, wait_until
from tests.integration.test_verifier_service import group
from tests.monitoring.nats_exporter import NatsExporter
from tests.monitoring.prometheus_server import PrometheusServer, prometheus_is_here
from tests.nats_server import NatsServer, free_port

pytestmark = pytest.mark.skipif(not prometheus_is_here(), reason="no prometheus: scripts/test-packages installs Debian's")

RULES = REPO / "k8s" / "components" / "monitoring" / "rules" / "swarm.yaml"
CONFIG = """
[generator]
engine = "transformers"
completions = 4
groups_per_call = 4
max_new_tokens = 12
threads = 1
[eval]
tasks = 12
every_versions = 4
[verifier]
intake_poll_s = 0.1
workers = 1
[sampler]
local = 2
external = 2
shortage = "fill_local"
shortage_wait_s = 5
[trainer]
learning_rate = 1e-4
checkpoint_every = 4
threads = 1
"""
START_S = 300.0
DATA_S = 60.0
WINDOW = "5m"
"""All of the run: a step may take longer than a short window on a busy machine."""
EVALUATED = 4
"""So many pass rates of twelve tasks do not agree by chance."""
HELD_OUT = ("node:swarm_held_out_pass_ratio:latest", "swarm_held_out_policy_version")
EMPTY_ROWS = {"vLLM": "this swarm samples with transformers"}
EMPTY_PANELS = {"Certificate time left"}
"""This swarm's servers have no TLS; tests/k8s/test_certificates.py has the figures themselves."""


@dataclass
class Watched:
    """A swarm that runs, and the Prometheus that has scraped it."""

    nodes: tuple[NodeProcesses, ...]
    prometheus: PrometheusServer
    server: NatsServer
    jobs: dict[str, list[tuple[str, dict[str, str]]]]


def _http_port(node: NodeProcesses, role: str) -> int | None:
    log = node.run_dir / f"{role}.log"
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    started = [line for line in map(json.loads, whole.splitlines()) if line.get("event") == "started"]
    return int(started[-1]["http_port"]) if started else None


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    var = tmp_path_factory.mktemp("var")
    demo = DEMO_CONFIG.read_text()
    config = var / "test.toml"
    config.write_text(CONFIG + demo[demo.index("[[tasks]]") :])
    monitor = free_port()
    server = NatsServer(var / "nats", config=f"server_name: nats-0\nhttp: 127.0.0.1:{monitor}").start()
    exporter = NatsExporter(f"http://127.0.0.1:{monitor}")
    settings = {
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__SWARM_URL": server.url,
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
    }
    nodes = tuple(NodeProcesses(name, "watched", var, settings, config).start() for name in ("alpha", "beta"))
    prometheus: PrometheusServer | None = None
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
        jobs = {"swarm": targets, "nats": [(exporter.address, {})]}
        prometheus = PrometheusServer(var / "prometheus", RULES, jobs).start()
        for node in nodes:
            wait_until(
                lambda node=node: any(line["groups_external"] for line in node.steps()),  # type: ignore[misc]
                *nodes,
                timeout_s=START_S,
                what=f"a step of {node.node} on another node's groups",
            )
            wait_until(
                lambda node=node: any(line["policy_version"] > 0 for line in node.evaluations()),  # type: ignore[misc]
                *nodes,
                timeout_s=START_S,
                what=f"an evaluation of a policy that {node.node} has trained",
            )
        yield Watched(nodes, prometheus, server, jobs)
    finally:
        if prometheus is not None:
            prometheus.kill()
        for node in nodes:
            node.kill_all()
        exporter.close()
        server.kill()


def _without_data(watched: Watched, panels: dict[str, Panel]) -> dict[str, list[str]]:
    """By panel the expressions that give nothing but NaN, or nothing."""
    found = {
        name: [expr for expr in (_filled_in(query.expr) for query in panel.queries) if not watched.prometheus.finite(expr)]
        for name, panel in panels.items()
    }
    return {name: missing for name, missing in found.items() if missing}


def _filled_in(expr: str) -> str:
    return substituted(expr, rate_interval=WINDOW, values={"node": "alpha|beta"})


def test_every_panel_shows_data(watched: Watched) -> None:
    rows = [(name, row) for name, dashboard in DASHBOARDS.items() for row in dashboard.rows]
    panels = {f"{name}/{row.title}/{panel.title}": panel for name, row in rows for panel in row.panels}
    empty = {title for title in panels if title.split("/")[1] in EMPTY_ROWS or title.split("/")[2] in EMPTY_PANELS}
    missing = _without_data(watched, panels)
    deadline = time.monotonic() + DATA_S  # rates want two scrapes, recorded series an evaluation after them
    while missing.keys() > empty and time.monotonic() < deadline:
        time.sleep(1.0)
        missing = _without_data(watched, {title: panels[title] for title in missing})
    assert {title: exprs for title, exprs in missing.items() if title not in empty} == {}
    for title in empty:
        assert len(missing[title]) == len(panels[title].queries), f"{title}: there is data, so it is no exception any more"


def test_every_rule_is_evaluated_without_an_error(watched: Watched) -> None:
    rules = [rule for group in watched.prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 40
    assert {(rule["name"], rule["health"], rule.get("lastError", "")) for rule in rules if rule["health"] != "ok"} == set()


def test_a_swarm_that_has_just_started_is_a_quiet_one(watched: Watched) -> None:
    # For moments a rule may be pending: a rate over the first two scrapes is nothing, and the first
    # few answers are all wrong.
    wait_until(
        lambda: {alert["labels"]["alertname"] for alert in watched.prometheus.ask("alerts")["alerts"]} == {"Watchdog"},
        *watched.nodes,
        timeout_s=DATA_S,
        what="no alert is even pending",
    )
    fired = watched.prometheus.values(f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{WINDOW}]))')
    assert {labels["alertname"] for labels, _ in fired} == {"Watchdog"}, "ever"


def test_figures_agree_with_the_run_s_own_records(watched: Watched) -> None:
    for node in watched.nodes:
        ((_, version),) = watched.prometheus.values(f'max by (node) (swarm_policy_version{{node="{node.node}", role="trainer"}})')
        assert 0 < version <= len(node.steps()) + 1
        figure, version_of_figure = (f'{metric}{{node="{node.node}"}}' for metric in HELD_OUT)
        wait_until(
            lambda metric=version_of_figure: (  # type: ignore[misc]
                len({value for _, value in watched.prometheus.history(metric, WINDOW)}) >= EVALUATED
            ),
            *watched.nodes,
            timeout_s=START_S,
            what=f"evaluations of {EVALUATED} policies of {node.node}",
        )
        figures = watched.prometheus.history(figure, WINDOW)
        versions = watched.prometheus.history(version_of_figure, WINDOW)
        written = {line["policy_version"]: line["pass_rate"] for line in node.evaluations()}
        for at, held_out in figures:
            # A rule does not see a scrape that began before it and ended after it, so its version
            # may be the one before.
            scraped = [version for began, version in versions if began <= at][-2:]
            assert held_out in [pytest.approx(written[version]) for version in scraped], f"version {scraped} at {at}"


PATIENCE = 0.05
"""Of the cluster's with what stands still or is silent: the same rules, and a test that ends."""
TOLD_S = 120.0
FLOOD = 4000
"""Messages that are signed and of tasks of their own: each takes one of the sender's turns."""


@pytest.fixture(scope="module")
def impatient(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """Another Prometheus over the same processes, which is told of faults within seconds."""
    folder = tmp_path_factory.mktemp("impatient")
    (folder / "rules.yml").write_text(rule_file(scale=PATIENCE))
    prometheus = PrometheusServer(folder, folder / "rules.yml", watched.jobs).start()
    yield prometheus
    prometheus.kill()


def firing(prometheus: PrometheusServer) -> set[tuple[str, str]]:
    """Alerts that fire, as (name, node)."""
    alerts = prometheus.ask("alerts")["alerts"]
    return {(each["labels"]["alertname"], each["labels"].get("node", "")) for each in alerts if each["state"] == "firing"}


def test_a_trainer_that_is_stopped_is_told_though_it_answers_no_scrape(watched: Watched, impatient: PrometheusServer) -> None:
    alpha, _ = watched.nodes
    stalled = ("SwarmTrainerStalled", "alpha")
    known = 'node:swarm_trainer_step_duration_seconds:mean6h{node="alpha"}'
    wait_until(lambda: impatient.finite(known), alpha, timeout_s=START_S, what="the usual pace of alpha's trainer")
    wait_until(lambda: stalled not in firing(impatient), alpha, timeout_s=START_S, what="a trainer at its pace")
    alpha.processes["trainer"].send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: stalled in firing(impatient), timeout_s=TOLD_S, what="the stopped trainer is told")
        wait_until(lambda: ("TargetDown", "alpha") in firing(impatient), timeout_s=TOLD_S, what="and that it does not answer")
        assert stalled in firing(impatient), "and goes on being told"
        assert ("SwarmTrainerStalled", "beta") not in firing(impatient)
    finally:
        alpha.processes["trainer"].send_signal(signal.SIGCONT)
    wait_until(lambda: stalled not in firing(impatient), alpha, timeout_s=START_S, what="a trainer that goes on is told no more")


def test_a_server_that_hangs_is_told(watched: Watched, impatient: PrometheusServer) -> None:
    os.kill(watched.server.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: ("NatsDown", "") in firing(impatient), timeout_s=TOLD_S, what="the server that hangs is told")
    finally:
        os.kill(watched.server.pid, signal.SIGCONT)
    wait_until(lambda: ("NatsDown", "") not in firing(impatient), timeout_s=START_S, what="a server that is back is told no more")


def test_a_flood_of_a_stranger_is_told(watched: Watched, impatient: PrometheusServer) -> None:
    async def flood() -> None:
        plane = await connect(watched.server.url, name="mallory", timeout_s=30)
        key = SigningKey(new_seed())
        for number in range(FLOOD):
            payload = encode(sign(group("mallory", number), key, share_tokens=False))
            await plane.publish(
                subjects.rollouts("mallory"), payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload)
            )
        await plane.close()

    flooded = {("SwarmFlood", node.node) for node in watched.nodes}
    assert not flooded & firing(impatient)
    sender = threading.Thread(target=lambda: asyncio.run(flood()), daemon=True)
    sender.start()
    wait_until(lambda: flooded & firing(impatient), timeout_s=TOLD_S, what="the flood is told")
    sender.join(TOLD_S)
    assert not sender.is_alive()
