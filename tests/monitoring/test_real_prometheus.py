"""Dashboards and rules before a real Prometheus that scrapes a real running swarm of two nodes, and
its real NATS server.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.processes import ROLES, wait_until
from tests.monitoring.dashboards import Panel, dashboards
from tests.monitoring.prometheus_server import PrometheusServer, prometheus_is_here
from tests.monitoring.promql import substituted
from tests.monitoring.rule_file import rule_file
from tests.monitoring.watched_swarm import START_S, WatchedSwarm, firing, flooding, unhurried, watched_swarm

pytestmark = pytest.mark.skipif(not prometheus_is_here(), reason="no prometheus: scripts/test-packages installs Debian's")

DATA_S = 60.0
WINDOW = "5m"
"""All of the run: a step may take longer than a short window on a busy machine."""
EVALUATED = 4
"""So many pass rates of twelve tasks do not agree by chance."""
HELD_OUT = ("node:swarm_held_out_pass_ratio:latest", "swarm_held_out_policy_version")
EMPTY_ROWS = {"vLLM": "this swarm samples with transformers"}
EMPTY_PANELS = {"Certificate time left", "Reward by part", "Lost in publishing"}
"""This swarm's servers have no TLS (tests/k8s/test_certificates.py has the figures themselves), its
sources have one reward each, and its policies are published whole.
"""


@dataclass
class Watched(WatchedSwarm):
    """A swarm that runs, and the Prometheus that has scraped it."""

    prometheus: PrometheusServer


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    var = tmp_path_factory.mktemp("var")
    with watched_swarm(var) as swarm:
        (var / "rules.yml").write_text(rule_file())
        prometheus = PrometheusServer(var / "prometheus", var / "rules.yml", swarm.jobs)
        try:
            prometheus.start()
            for node in swarm.nodes:
                wait_until(
                    lambda node=node: any(line["groups_external"] for line in node.steps()),  # type: ignore[misc]
                    *swarm.nodes,
                    timeout_s=START_S,
                    what=f"a step of {node.node} on another node's groups",
                )
                wait_until(
                    lambda node=node: any(line["policy_version"] > 0 for line in node.evaluations()),  # type: ignore[misc]
                    *swarm.nodes,
                    timeout_s=START_S,
                    what=f"an evaluation of a policy that {node.node} has trained",
                )
            yield Watched(swarm.nodes, swarm.server, swarm.jobs, prometheus)
        finally:
            prometheus.kill()


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
    rows = [(name, row) for name, dashboard in dashboards().items() for row in dashboard.rows]
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
PACE = {"scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "1s"}
"""On a busy machine a scrape may take over two seconds, and one that was given up tells nothing."""
STOP_S = 60.0
"""Of the cluster's with what stands still or is silent: the same rules, and a test that ends."""
TOLD_S = 120.0


@pytest.fixture(scope="module")
def impatient(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """Another Prometheus over the same processes, which is told of faults within seconds. From now
    on they need not do much else.
    """
    folder = tmp_path_factory.mktemp("impatient")
    (folder / "rules.yml").write_text(rule_file(scale=PATIENCE))
    prometheus = PrometheusServer(folder, folder / "rules.yml", watched.jobs, PACE).start()
    with unhurried(*watched.nodes):
        yield prometheus
    prometheus.kill()


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

        # On a machine with much else to do, the other one may really stand still for seconds.
        def alone() -> bool:
            return {each for each in firing(impatient) if each[0] == stalled[0]} == {stalled}

        wait_until(alone, timeout_s=START_S, what="and of the other trainer nothing is told")
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
    flooded = {("SwarmFlood", node.node) for node in watched.nodes}
    assert not flooded & firing(impatient)
    with flooding(watched.server.url):
        wait_until(lambda: flooded & firing(impatient), timeout_s=TOLD_S, what="the flood is told")


def test_a_node_and_a_server_that_are_no_targets_any_more_are_told(watched: Watched, impatient: PrometheusServer) -> None:
    known = 'node:swarm_role_needed:bool{node="alpha"}'
    wait_until(lambda: len(impatient.finite(known)) == len(ROLES), timeout_s=START_S, what="the node is known")
    impatient.discover("swarm", [(address, labels) for address, labels in watched.jobs["swarm"] if labels["node"] != "alpha"])
    impatient.discover("nats", [])
    try:
        roles = 'ALERTS{alertname="SwarmRoleMissing", alertstate="firing"}'

        def missing() -> set[tuple[str, str]]:
            return {(labels["node"], labels["role"]) for labels, _ in impatient.values(roles)}

        all_roles = {("alpha", role) for role in ROLES}
        wait_until(lambda: missing() == all_roles, timeout_s=TOLD_S, what="each role of the node is told")
        wait_until(lambda: ("NatsDown", "") in firing(impatient), timeout_s=TOLD_S, what="the server is told")
    finally:
        for job, targets in watched.jobs.items():
            impatient.discover(job, targets)
    lost = {("SwarmRoleMissing", "alpha"), ("NatsDown", "")}
    wait_until(lambda: not lost & firing(impatient), timeout_s=START_S, what="what is back is told no more")


def test_a_node_that_is_stopped_on_purpose_pages_nobody_and_one_that_dies_does(
    watched: Watched, impatient: PrometheusServer
) -> None:
    alpha, beta = watched.nodes
    watched.prometheus.kill()  # one of two on a machine may get the last scrape of both
    time.sleep(15)  # so that the last scrapes of each process are all the other one's
    for role in ROLES:
        alpha.processes[role].send_signal(signal.SIGTERM)
    assert {alpha.processes[role].wait(STOP_S) for role in ROLES} == {0}
    wait_until(
        lambda: impatient.values('node:swarm_stopped:bool{node="alpha"} == 1'), timeout_s=TOLD_S, what="the last scrape told it"
    )
    for role in ROLES:
        beta.kill(role)
    wait_until(lambda: ("SwarmRoleMissing", "beta") in firing(impatient), timeout_s=TOLD_S, what="the node that died is told")
    critical = impatient.values('ALERTS{alertstate=~"firing|pending", severity="critical", node="alpha"}')
    assert critical == [], "no page, and none to come"
