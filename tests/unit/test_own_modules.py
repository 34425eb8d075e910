"""What lies in the current folder is no part of `swarm`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.config import load_config
from shared.config.model_section import ModelSection
from swarm_cli.installation import own_modules
from swarm_cli.local.supervisor import run_lines
from swarm_cli.model.facts import read_facts
from swarm_cli.task_probe import begin_deriving
from tests.integration.trainer_life import tiny_policy

ROOT = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a package called as one of ours; what its code makes."""
    made = tmp_path / "made"
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text(f"open({str(made)!r}, 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return made


def test_the_processes_of_a_run_import_nothing_from_the_current_folder(elsewhere: Path) -> None:
    line = "exec python -m shared.runtime.supervise -- python -m shared.version"
    outcome = run_lines({"progress": line}, os.environ)  # whose end ends a run
    assert outcome.code == 0 and not elsewhere.exists()


@pytest.mark.slow
def test_the_process_that_tries_a_tokens_tasks_imports_nothing_from_the_current_folder(elsewhere: Path) -> None:
    assert begin_deriving(load_config(overrides={"tasks": [{"dataset": "gcd"}]}).tasks, 0, "")().problems == []
    assert not elsewhere.exists()


@pytest.mark.slow
def test_the_process_that_reads_a_model_imports_nothing_from_the_current_folder(elsewhere: Path, tmp_path: Path) -> None:
    tiny_policy(tmp_path / "model")
    assert read_facts(ModelSection(path=str(tmp_path / "model")))().problems == []
    assert not elsewhere.exists()


def test_a_checkout_that_is_not_installed_runs_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert own_modules() == {}
