"""A misspelt dataset is refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.tasks.config_rules import REFUSED_DATASETS
from shared.tasks.derive import dataset_names
from swarm_cli.local.known_datasets import known_datasets

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_names_in_the_source_are_those_of_the_registry() -> None:
    assert known_datasets() - REFUSED_DATASETS.keys() == set(dataset_names())


@pytest.mark.slow
def test_a_misspelt_dataset_is_refused_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('[model]\npath = "nowhere"\n[[tasks]]\ndataset = "base_conversoin"\n')
    command = [sys.executable, "-m", "swarm_cli", "up", "--config", str(tmp_path / "node.toml")]
    environment = {**os.environ, "SWARM_NODE__VAR_DIR": str(tmp_path / "var")}
    before_s = os.times().children_user
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 78
    assert "'base_conversoin': unknown; did you mean base_conversion?" in answer.stderr
    assert not (tmp_path / "var" / "runs").exists()
    assert os.times().children_user - before_s < 10, "nothing was loaded"
