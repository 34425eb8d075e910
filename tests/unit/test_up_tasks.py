"""Task sources that cannot be used, or demand too much, are refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSPELT = '[[tasks]]\ndataset = "base_conversoin"\n[[tasks]]\ndataset = "gcd"\nconfig = { min_valu = 1 }\n'
TOO_LARGE = '[[tasks]]\ndataset = "graph_color"\nconfig = { min_num_vertices = 1000000000, max_num_vertices = 1000000000 }\n'


def refused(tmp_path: Path, tasks: str) -> str:
    (tmp_path / "node.toml").write_text(f'[model]\npath = "nowhere"\n{tasks}')
    command = [sys.executable, "-m", "swarm_cli", "up", "--config", str(tmp_path / "node.toml")]
    environment = {**os.environ, "SWARM_NODE__VAR_DIR": str(tmp_path / "var")}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 78 and answer.stderr.rstrip().endswith("nothing was started"), answer.stderr
    assert not (tmp_path / "var" / "runs").exists()
    return answer.stderr


@pytest.mark.slow
def test_task_sources_that_cannot_be_used_are_told_all_at_once(tmp_path: Path) -> None:
    said = refused(tmp_path, MISSPELT)
    assert "[[tasks]] 1: base_conversoin: neither" in said and "did you mean base_conversion?" in said
    assert "[[tasks]] 2: gcd: config key 'min_valu' is unknown" in said


@pytest.mark.slow  # it fills a gibibyte
def test_a_task_source_that_takes_too_much_memory_reaches_no_service(tmp_path: Path) -> None:
    assert "graph_color" in refused(tmp_path, TOO_LARGE)
