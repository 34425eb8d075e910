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


def test_prometheus_takes_the_scrape_configuration_for_clusters_without_the_operator(tmp_path: Path) -> None:
    written = yaml.safe_load(SCRAPE.read_text())
    for job in written["scrape_configs"]:
        # Debian's build leaves out discovery in Kubernetes: everything else of the job is checked.
        assert job.pop("kubernetes_sd_configs")[0]["role"] == "pod"
        job["static_configs"] = [{"targets": ["localhost:9400"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({**written, "rule_files": [str(RULES)]}))
    _promtool("check", "config", tmp_path / "prometheus.yml")
