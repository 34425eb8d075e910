"""A file whose rows are soon used up for sharing is warned of before a run begins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shared.config import NodeConfig, load_config
from shared.config.task_sections import TaskSpec
from shared.tasks.file_rows import FileQuestions
from shared.tasks.specs import check_specs, file_questions
from swarm_cli.join.command import prepare
from swarm_cli.local.up import tasks_checked
from swarm_cli.risky_settings import row_limit_warnings
from swarm_cli.task_probe import TaskProbe
from tests import forked
from tests.unit.test_invitation import invitation

ROOT = Path(__file__).parents[2]


def configured(**sections: Any) -> NodeConfig:
    return load_config(overrides={"tasks": [{"dataset": "gcd"}], **sections}, environment={})


def rows(folder: Path, count: int, name: str = "mine.jsonl") -> str:
    lines = [json.dumps({"question": f"What is {number} + 1?", "answer": str(number + 1)}) for number in range(count)]
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def test_the_warning_says_how_many_groups_are_taken_for_how_long_that_lasts_and_how_many_rows_are_enough() -> None:
    (few,) = row_limit_warnings(configured(), [FileQuestions(0, "mine.jsonl", 60, 20, 1.0)])
    for words in (
        "[[tasks]] 1: mine.jsonl: few rows for sharing, 40 questions besides the 20 that evaluation takes",
        "16 groups an hour from another node: 640 in all",
        "has sent in 10m",
        "refused as `repeated`",
        "225 to train on last the hour",
    ):
        assert words in few, few


def test_a_file_that_lasts_the_hour_is_not_warned_of_and_each_file_counts_by_its_part_of_the_draws() -> None:
    assert row_limit_warnings(configured(), [FileQuestions(0, "mine.jsonl", 225, 0, 1.0)]) == []
    assert len(row_limit_warnings(configured(), [FileQuestions(0, "mine.jsonl", 224, 0, 1.0)])) == 1
    assert row_limit_warnings(configured(), [FileQuestions(0, "mine.jsonl", 60, 0, 0.25)]) == []
    (second,) = row_limit_warnings(configured(), [FileQuestions(1, "few.jsonl", 8, 0, 0.5)])
    assert second.startswith("[[tasks]] 2: few.jsonl: few rows for sharing, 8 questions.") and "113 to train on" in second


def test_a_node_that_takes_no_foreign_groups_is_not_warned() -> None:
    few = [FileQuestions(0, "mine.jsonl", 8, 4, 1.0)]
    assert row_limit_warnings(configured(sampler={"external": 0}), few) == []


def test_entries_with_the_same_rows_count_together(tmp_path: Path) -> None:
    first = TaskSpec(source="file", path=rows(tmp_path, 20), verifier="exact")
    again = first.model_copy(update={"path": rows(tmp_path, 20, "copy.jsonl")})
    specs = check_specs([first, TaskSpec(dataset="gcd", weight=2.0), again], 8)
    assert file_questions(specs, 8) == [FileQuestions(0, first.path, questions=20, held_out=4, part=0.5)]


@pytest.mark.slow
def test_the_process_that_reads_the_files_counts_different_questions(tmp_path: Path) -> None:
    path = rows(tmp_path, 20)
    Path(path).write_text(Path(path).read_text() + '\n{"question": "What is 3 + 1?", "answer": "4"}\n')
    tasks = configured(tasks=[{"dataset": "gcd", "weight": 3.0}, {"source": "file", "path": path}]).tasks
    with TaskProbe() as apart:
        derived = apart.derive(tasks, 8, "")
        assert derived.problems == [] and derived.files == [FileQuestions(1, path, 20, 2, 0.25)]
        derived = apart.derive(configured().tasks, 8, "")
        assert derived.problems == [] == derived.files


@pytest.mark.slow
def test_the_start_of_several_nodes_warns_and_that_of_one_alone_does_not(tmp_path: Path) -> None:
    config = configured(eval={"tasks": 4}, tasks=[{"source": "file", "path": rows(tmp_path, 8)}])
    (warned,) = tasks_checked(config, alone=False)()
    assert "64 in all" in warned and "in 1m" in warned
    assert tasks_checked(config, alone=True)() == []


@pytest.mark.slow
def test_config_check_warns_of_a_file_of_few_rows(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(f'[eval]\ntasks = 4\n[[tasks]]\nsource = "file"\npath = "{rows(tmp_path, 8)}"\n')
    asked = ["config", "check", "--config", str(tmp_path / "node.toml")]
    environment = {**os.environ, "SWARM_MODEL__PATH": str(ROOT / "models" / "base")}
    checked = forked.run("swarm_cli", asked, environment=environment, cwd=ROOT, timeout=180)
    said = " ".join((checked.stdout + checked.stderr).split())
    assert checked.returncode == 0, said
    assert "4 questions besides the 4 that evaluation takes" in said and "64 in all" in said, said


@pytest.mark.slow
def test_joining_warns_of_a_file_of_few_rows_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path / "var"))
    own = tmp_path / "node.toml"
    files = [rows(tmp_path, 8), rows(tmp_path, 999, "long.jsonl")]
    entries = ['dataset = "gcd"', *(f'source = "file"\npath = "{path}"' for path in files)]
    own.write_text("\n".join(["[eval]", "tasks = 4", *(f"[[tasks]]\n{entry}" for entry in entries)]))
    newcomer = prepare(invitation(url="nats://127.0.0.1:1"), model=str(ROOT / "models" / "base"), config=own)
    (told,) = (each for each in newcomer.look(thoroughly=False) if each.what == "few rows")
    assert told.ok is None and "[[tasks]] 2: " in told.told and "mine.jsonl: few rows for sharing, 7 questions" in told.line, told


@pytest.mark.slow
def test_joining_names_the_rows_that_are_left_out_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path / "var"))
    path, own = rows(tmp_path, 400), tmp_path / "node.toml"
    with open(path, "a") as file:
        file.write('\n{"question": "What is north of here?", "answer": "a pole"}\n')
    own.write_text(f'[[tasks]]\nsource = "file"\npath = "{path}"\nverifier = "final_number"\n')
    newcomer = prepare(invitation(url="nats://127.0.0.1:1"), model=str(ROOT / "models" / "base"), config=own)
    (told,) = (each for each in newcomer.look(thoroughly=False) if each.what == "left out")
    assert told.ok is None and "[[tasks]] 1: " in told.told and "line 401" in told.told, told
