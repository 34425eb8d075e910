"""The Prometheus configuration of docs/operations.md for machines without Kubernetes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"


def test_promtool_takes_it_with_the_rules_it_names_and_it_asks_every_role_of_both_nodes(tmp_path: Path) -> None:
    (written,) = re.findall(r"```yaml\n(rule_files: .*?)```", PAGE.read_text(), re.DOTALL)
    config = yaml.safe_load(written)
    config["rule_files"] = [str(ROOT / file) for file in config["rule_files"]]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))

    done = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True, timeout=180, check=False)

    assert done.returncode == 0 and re.search(r"SUCCESS: \d\d+ rules found", done.stdout), done.stdout + done.stderr
    (job,) = config["scrape_configs"]
    labels = [(group["labels"]["node"], group["labels"]["role"]) for group in job["static_configs"]]
    assert job["job_name"] == "swarm"
    assert labels == [(node, role) for node in ("alpha", "beta") for role in ("generator", "verifier", "sampler", "trainer")]
