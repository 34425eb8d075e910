"""The Prometheus configuration of docs/metrics.md for machines without Kubernetes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from shared.roles import ROLES
from swarm_cli.local.procfile import Layout

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"


def test_promtool_takes_it_with_the_rules_it_names_and_it_asks_every_role_of_both_nodes(tmp_path: Path) -> None:
    (written,) = re.findall(r"```yaml\n(rule_files: .*?)```", PAGE.read_text(), re.DOTALL)
    config = yaml.safe_load(written)
    config["rule_files"] = [str(ROOT / file) for file in config["rule_files"]]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))

    done = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True, timeout=180, check=False)

    assert done.returncode == 0 and re.search(r"SUCCESS: \d\d+ rules found", done.stdout), done.stdout + done.stderr
    job, nats = config["scrape_configs"]
    asked = {(group["labels"]["node"], group["labels"]["role"]): group["targets"] for group in job["static_configs"]}
    assert (job["job_name"], nats["job_name"]) == ("swarm", "nats")
    ports = {what: port for port, what in Layout().ports.items()}
    wanted = {(node, role): f"{node}'s {role}" for node in Layout().node_names for role in ROLES}
    assert asked == {who: [f"127.0.0.1:{ports[what]}"] for who, what in wanted.items()}, "as `swarm up` starts them"
