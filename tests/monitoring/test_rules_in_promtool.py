"""Rules as Prometheus itself reads them: promtool parses them and runs every alert's cases, firing
and not firing.
"""

from __future__ import annotations

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
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8000:]
    return said


def test_prometheus_takes_the_rules() -> None:
    said = _promtool("check", "rules", RULES)
    assert "SUCCESS" in said and "duplicate" not in said, said


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert CASES
    _promtool("test", "rules", *CASES)


def test_prometheus_takes_the_scrape_configuration_for_clusters_without_the_operator(tmp_path: Path) -> None:
    written = yaml.safe_load(SCRAPE.read_text())
    for job in written["scrape_configs"]:
        # Debian's build leaves out discovery in Kubernetes: everything else of the job is checked.
        assert job.pop("kubernetes_sd_configs")[0]["role"] == "pod"
        job["static_configs"] = [{"targets": ["localhost:9400"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({**written, "rule_files": [str(RULES)]}))
    _promtool("check", "config", tmp_path / "prometheus.yml")
