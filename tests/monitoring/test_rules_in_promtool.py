"""Rules as Prometheus itself reads them: promtool parses them and runs every alert's cases, firing
and not firing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring.metrics_doc import ROLES, full_name, role_families, watch_families
from tests.monitoring.all_rules import alerts, records
from tests.monitoring.foreign_metrics import NATS, PROCESS, PROMETHEUS
from tests.monitoring.promql import family_of, metrics_of

REPO = Path(__file__).resolve().parents[2]
RULES = REPO / "k8s" / "components" / "monitoring" / "rules" / "swarm.yaml"
SCRAPE = REPO / "k8s" / "components" / "monitoring-plain" / "scrape.yaml"
CASES = sorted((Path(__file__).parent / "rules").glob("*.test.yaml"))

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: scripts/test-packages installs Debian's prometheus"
)


def _promtool(*arguments: str | Path) -> str:
    # A fifth of its time is Go's garbage collection.
    environment = {"GOGC": "400"} | os.environ
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8000:]
    return said


def test_prometheus_takes_the_rules() -> None:
    said = _promtool("check", "rules", RULES)
    assert "SUCCESS" in said and "duplicate" not in said, said


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert CASES
    _promtool("test", "rules", *(_with_its_rules_alone(case, tmp_path) for case in CASES))


def _with_its_rules_alone(case: Path, folder: Path) -> Path:
    """The case with the alerts that it asks for and the recording rules of which they, or it, make
    use. Promtool evaluates all rules of a file at each minute of each case, and looks at no alert
    that the case does not name: the others cost most of its time and change nothing.
    """
    asked = yaml.safe_load(case.read_text())
    named = {alert["alertname"] for test in asked["tests"] for alert in test.get("alert_rule_test", [])}
    all_groups = yaml.safe_load(RULES.read_text())["groups"]
    every = [rule for group in all_groups for rule in group["rules"]]
    used = [rule for rule in every if rule.get("alert") in named or "ALERTS" in rule["expr"]]
    read = [str(asked["tests"]), *(rule["expr"] for rule in used)]
    while more := [
        rule for rule in every if rule not in used and "record" in rule and any(rule["record"] in each for each in read)
    ]:
        used += more
        read += [rule["expr"] for rule in more]
    chosen = ({**group, "rules": [rule for rule in group["rules"] if rule in used]} for group in all_groups)
    groups = [group for group in chosen if group["rules"]]
    kept = {group["name"] for group in groups}
    (folder / f"{case.stem}.rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    asked["rule_files"] = [f"{case.stem}.rules.yaml"]
    asked["group_eval_order"] = [name for name in asked.get("group_eval_order", []) if name in kept]
    (folder / case.name).write_text(yaml.safe_dump(asked))
    return folder / case.name


NODE = "alpha"
LIVES = 60
"""Minutes for which everything runs in the scenarios below."""
SOURCES = {role: ("SwarmRoleMissing", {"job": "swarm", "node": NODE, "role": role, "severity": "critical"}) for role in ROLES} | {
    "nats": ("NatsDown", {"job": "nats", "instance": "nats-0", "severity": "critical"}),
    "nats-watch": ("NatsWatchDeaf", {"job": "nats-watch", "severity": "warning"}),
}
"""By what exports a series: the alert, with its labels, on its disappearance."""


def _exported_by() -> dict[str, set[str]]:
    """Names of series by what exports them."""
    found = {role: {full_name(family) for family in role_families(role)} | set(PROCESS) for role in ROLES}
    return found | {"nats": set(NATS), "nats-watch": {full_name(family) for family in watch_families()}}


def _raw_metrics(expr: str) -> set[str]:
    """The exported series that an expression reads, also by way of recorded ones."""
    recorded = {record.name: record.expr for record in records()}
    found, left = set[str](), metrics_of(expr)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        left |= metrics_of(recorded[name]) if name in recorded else set()
    return {name for name in found if name not in recorded}


def test_whatever_an_alert_reads_its_disappearance_is_told(tmp_path: Path) -> None:
    exported = _exported_by()
    for alert in alerts():
        for name in _raw_metrics(alert.expr) - PROMETHEUS.keys():
            assert any({name, family_of(name)} & names for names in exported.values()), (
                f"{alert.name}: nothing tells that {name} is gone"
            )
    # Targets that answer but export less: an exporter of one's own, asked for other figures.
    (some_missing,) = (alert.expr for alert in alerts() if alert.name == "NatsMetricsMissing")
    told = {"_".join(name.split("_")[:2]) for name in metrics_of(some_missing)}
    for alert in alerts():
        assert {"_".join(name.split("_")[:2]) for name in _raw_metrics(alert.expr) & NATS.keys()} <= told, alert.name
    for source, (name, labels) in SOURCES.items():
        series = _everything(ends={source: "stale"})
        quiet = {"eval_time": f"{LIVES - 5}m", "alertname": name, "exp_alerts": []}
        loud = {"eval_time": f"{LIVES + 40}m", "alertname": name, "exp_alerts": [{"exp_labels": labels}]}
        _play(tmp_path, f"{source} is gone", series, [quiet, loud])


@pytest.mark.parametrize("then", ["stale", "0x120"], ids=["no targets any more", "targets that do not answer"])
def test_a_stop_on_purpose_pages_nobody(then: str, tmp_path: Path) -> None:
    series = _everything(ends=dict.fromkeys((*ROLES, "nats", "nats-watch"), then), stopped=True)
    critical = sorted({alert.name for alert in alerts() if alert.severity == "critical"})
    assert {"NatsDown", "SwarmRoleMissing", "SwarmTrainerStalled", "SwarmLearningBudgetBurns"} < set(critical)
    asked = [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []}
        for name in critical
        for minute in (LIVES - 5, LIVES + 5, LIVES + 40, LIVES + 110)
    ]
    _play(tmp_path, "stopped on purpose", series, asked)


def _everything(*, ends: dict[str, str], stopped: bool = False) -> list[dict[str, str]]:
    """A whole node, its server and its watch, each well for `LIVES` minutes. `ends`: what then
    becomes of the `up` of some; their other series end. `stopped`: the node was asked to stop.
    """
    minute = 60
    moving = {
        "swarm_trainer_last_step_timestamp_seconds": f"1+{minute}x{LIVES}",
        "swarm_trainer_steps_total": f"0+6x{LIVES}",
        "swarm_stop_requested_timestamp_seconds": f"0x{LIVES - 1} {minute * LIVES if stopped else 0}",
    }
    found: list[dict[str, str]] = []

    def add(source: str, name: str, labels: dict[str, str], values: str) -> None:
        label_text = ", ".join(f'{key}="{value}"' for key, value in labels.items())
        after = ends.get(source)
        values += f" {after if name == 'up' else 'stale'}" if after else ""
        found.append({"series": f"{name}{{{label_text}}}", "values": values if after else values.replace(f"x{LIVES}", "x400")})

    for role in ROLES:
        labels = {"job": "swarm", "node": NODE, "role": role, "instance": f"{NODE}-{role}-0"}
        add(role, "up", labels, f"1x{LIVES}")
        add(role, "process_start_time_seconds", labels, f"1x{LIVES}")
        for family in role_families(role):
            for sample in family.samples:
                if sample.name.endswith("_bucket") or sample.name == "swarm_trainer_finished":
                    continue
                well = 1.0 if sample.name in ("swarm_ready", "swarm_nats_connected", "swarm_sandbox_protections") else 0.0
                values = moving.get(sample.name, f"{well:g}x{LIVES}")
                add(role, sample.name, labels | sample.labels, values)
        if role == "trainer":
            add(role, "swarm_trainer_last_step_timestamp_seconds", labels, moving["swarm_trainer_last_step_timestamp_seconds"])
    server = {"job": "nats", "instance": "nats-0"}
    add("nats", "up", server, f"1x{LIVES}")
    add("nats", "nats_healthz_status_value", server, f"1x{LIVES}")
    for name in ("nats_varz_slow_consumers", "nats_server_max_storage"):
        add("nats", name, server, f"1x{LIVES}")
    stream = {"account": "A", "stream_name": "NODE_ALPHA_BATCHES", "is_stream_leader": "true"}
    add("nats", "nats_stream_total_messages", server | stream, f"1x{LIVES}")
    watch = {"job": "nats-watch", "instance": "nats-watch-0"}
    add("nats-watch", "up", watch, f"1x{LIVES}")
    add("nats-watch", "swarm_nats_watch_listening", watch, f"1x{LIVES}")
    return found


def _play(folder: Path, name: str, series: list[dict[str, str]], asked: list[dict[str, object]]) -> None:
    """Run the rules over `series`; alerts are compared by their labels."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    test = {"name": name, "interval": "1m", "input_series": series, "alert_rule_test": asked}
    order = [group["name"] for group in rules["groups"]]
    written = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "group_eval_order": order, "tests": [test]}
    (folder / "case.yaml").write_text(yaml.safe_dump(written))
    _promtool("test", "rules", folder / "case.yaml")


def test_prometheus_takes_the_scrape_configuration_for_clusters_without_the_operator(tmp_path: Path) -> None:
    written = yaml.safe_load(SCRAPE.read_text())
    for job in written["scrape_configs"]:
        # Debian's build leaves out discovery in Kubernetes: everything else of the job is checked.
        assert job.pop("kubernetes_sd_configs")[0]["role"] == "pod"
        job["static_configs"] = [{"targets": ["localhost:9400"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({**written, "rule_files": [str(RULES)]}))
    _promtool("check", "config", tmp_path / "prometheus.yml")
