"""Rules, without Prometheus: names, severities, runbooks, tests, and that every metric they or a
panel read exists.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.metrics_doc import ROLES, full_name, role_families, watch_families
from monitoring.rules import COMMAND, COMPONENT, OPERATOR_OBJECT, operator_object
from services.verifier.border import Refusal
from tests.monitoring.all_rules import alerts, groups, records
from tests.monitoring.dashboards import dashboards
from tests.monitoring.foreign_metrics import FOREIGN
from tests.monitoring.promql import family_of, metrics_of

REPO = Path(__file__).resolve().parents[2]
RUNBOOKS = REPO / "docs" / "runbooks"
RULE_TESTS = REPO / "tests" / "monitoring" / "rules"
DASHBOARDS = dashboards()
ALWAYS_FIRES = "Watchdog"
SECTIONS = ("## Check", "## Fix")


def _exported() -> set[str]:
    services = {full_name(family) for role in ROLES for family in role_families(role)}
    return services | {full_name(family) for family in watch_families()}


def _expressions() -> list[tuple[str, str]]:
    found = [(alert.name, alert.expr) for alert in alerts()] + [(record.name, record.expr) for record in records()]
    for dashboard in DASHBOARDS.values():
        found += [(f"{dashboard.title}/{panel.title}", query.expr) for panel in dashboard.panels() for query in panel.queries]
    return found


def test_the_operator_s_object_holds_the_rules() -> None:
    assert OPERATOR_OBJECT.read_text() == operator_object(), f"run `{COMMAND}`"
    assert yaml.safe_load(operator_object())["spec"]["groups"] == groups()


def test_every_metric_that_a_rule_or_panel_reads_is_exported_or_recorded() -> None:
    known = _exported() | FOREIGN.keys() | {record.name for record in records()}
    unknown = {
        (where, name)
        for where, expr in _expressions()
        for name in metrics_of(expr)
        if name not in known and family_of(name) not in known
    }
    assert not unknown


def test_no_recorded_series_and_no_foreign_name_is_kept_for_nobody() -> None:
    read = {name for _, expr in _expressions() for name in metrics_of(expr)}
    read |= {family_of(name) for name in read}
    assert {record.name for record in records()} - read == set()
    assert FOREIGN.keys() - read == set()


def test_recorded_names_say_level_metric_and_operations() -> None:
    names = [record.name for record in records()]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"node:swarm_[a-z_]+:[a-z0-9_]+", name), name


def test_alerts_are_named_like_symptoms_and_say_what_a_person_needs() -> None:
    for alert in alerts():
        assert re.fullmatch(r"(Swarm|Nats)[A-Z][A-Za-z]+|TargetDown|Watchdog", alert.name)
        assert alert.annotations.keys() == {"summary", "description", "runbook_url", "dashboard"}
        assert alert.annotations["runbook_url"] == f"docs/runbooks/{alert.name}.md"
        assert alert.severity in ("critical", "warning", "none")
        if alert.name != ALWAYS_FIRES:
            assert "$labels." in alert.annotations["summary"], f"{alert.name}: which one?"
            waits = bool(alert.hold) or re.search(r"\[\d+[mhd](:\d+s)?\]", alert.expr)
            assert waits, f"{alert.name} fires on a single bad scrape"
        assert alert.annotations["dashboard"].startswith(tuple(f"/d/{dashboard.uid}" for dashboard in DASHBOARDS.values()))


def test_one_name_twice_is_one_alert_at_two_severities() -> None:
    seen: set[tuple[str, str]] = set()
    for alert in alerts():
        assert (alert.name, alert.severity) not in seen
        seen.add((alert.name, alert.severity))
    names = [group["name"] for group in groups()]
    assert len(set(names)) == len(names)


def test_every_alert_has_a_runbook_page_and_every_page_an_alert() -> None:
    names = {alert.name for alert in alerts()}
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == names
    for name in sorted(names):
        text = (RUNBOOKS / f"{name}.md").read_text()
        assert re.match(rf"# {name}\n\n[A-Z`]", text), f"{name}: the meaning comes first"
        for section in SECTIONS:
            assert section in text, f"{name}: no section {section!r}"
        assert f"({name}.md)" in (RUNBOOKS / "README.md").read_text(), f"{name} is not in the list of runbooks"


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_every_panel_that_a_runbook_names_is_on_a_dashboard(page: Path) -> None:
    text = re.sub(r"`+[^`]+`+", "", " ".join(page.read_text().split()))
    titles = {panel.title for dashboard in DASHBOARDS.values() for panel in dashboard.panels()}
    assert set(re.findall(r'"([A-Z][^"]+)"', text)) <= titles


def test_every_log_event_that_a_runbook_names_is_written_somewhere() -> None:
    code = "\n".join(file.read_text() for folder in ("services", "shared", "swarm_cli") for file in (REPO / folder).rglob("*.py"))
    logged = set(re.findall(r'\.(?:debug|info|warning|error|exception)\(\s*"([a-z_]+)"', code))
    for page in RUNBOOKS.glob("*.md"):
        sentences = re.split(r"(?<=[.:;]) |\n\n|\n- ", page.read_text())
        for sentence in (each for each in sentences if re.search(r"\blogs?\b", each, re.IGNORECASE)):
            for event in re.findall(r"`([a-z]+_[a-z_]+)`", sentence):
                reasons = {"slow_consumer", *(refusal.value for refusal in Refusal)}
                assert event in logged | reasons, f"{page.name}: nothing logs {event}"


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    files = {file.name.removesuffix(".test.yaml") for file in RULE_TESTS.glob("*.test.yaml")}
    assert files == {alert.name for alert in alerts()}
    for name in files:
        cases = [
            case["exp_alerts"]
            for test in yaml.safe_load((RULE_TESTS / f"{name}.test.yaml").read_text())["tests"]
            for case in test["alert_rule_test"]
            if case["alertname"] == name
        ]
        assert any(cases), f"{name} never fires in its tests"
        assert name == ALWAYS_FIRES or not all(cases), f"{name} always fires in its tests"


@pytest.mark.parametrize(
    ("alert", "bound_s", "evaluations"),
    [("SwarmTrainerStalled", 120, 2), ("NatsDown", 0, 1), ("SwarmFlood", 0, 1)],  # a stall is recorded, then looked at
)
def test_what_a_cluster_is_promised_within_five_minutes_is_told_by_then_at_the_worst(
    alert: str, bound_s: int, evaluations: int
) -> None:
    found: Any = groups()
    ((every, rule),) = [(group["interval"], each) for group in found for each in group["rules"] if each.get("alert") == alert]
    assert every.endswith("s") and rule["for"].endswith("m") and {group["interval"] for group in found} == {every}
    every_s, hold_s = int(every[:-1]), 60 * int(rule["for"][:-1])
    monitors = yaml.safe_load_all((COMPONENT / "pod-monitors.yaml").read_text())
    scrape_s = max(
        int(end["interval"].rstrip("s")) + int(end["scrapeTimeout"].rstrip("s"))
        for monitor in monitors
        for end in monitor["spec"]["podMetricsEndpoints"]
    )
    assert f"> {bound_s}" in rule["expr"] or not bound_s
    held_s = -(-hold_s // every_s) * every_s
    assert scrape_s + bound_s + evaluations * every_s + held_s < 300


def test_metrics_are_found_in_expressions() -> None:
    assert metrics_of(
        'sum by (node, le) (rate(a_bucket{b="c{d}"}[$__rate_interval])) > on (job) group_left (x) n:d:e offset 10m'
    ) == {
        "a_bucket",
        "n:d:e",
    }
    assert metrics_of("time() - max by (node) (x_seconds > 0) or vector(1) < 5 * 1e9") == {"x_seconds"}
    assert family_of("a_bucket") == family_of("a_sum") == "a"
