"""What a trainer writes of its steps, and when it publishes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from services.trainer.records import MetricsLog, PhaseSeconds, StepRecord, forget_steps_after, scalars
from services.trainer.step_publisher import publication


def record(step: int, **changes: float) -> StepRecord:
    numbers = {each.name: 0.5 for each in fields(StepRecord) if each.type in ("float", "float | None")}
    counts = {each.name: 1 for each in fields(StepRecord) if each.type == "int"}
    rest = {"updated": True, "reward_local": 0.5, "reward_external": None, "skipped": {}, "absurd_of": {"beta": 1}}
    rest |= {"staleness_mean": None, "staleness_max": None}
    values = {**numbers, **counts, **rest, "step": step, "phase_seconds": PhaseSeconds(wait=0.25), **changes}
    return StepRecord(**values)  # type: ignore[arg-type]


def steps_in(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_a_resumed_log_forgets_later_steps_torn_lines_and_repeats(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step":1}\n{"step":2}\n{"step":2,"again":1}\n{"step":3}\n{"step":4}\n{"st')
    forget_steps_after(file, 3)
    assert file.read_text() == '{"step":1}\n{"step":2,"again":1}\n{"step":3}\n'


def test_each_step_is_one_line_that_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.append(record(1))
    assert steps_in(tmp_path / "metrics.jsonl") == [1]
    log.append(record(2, loss=float("nan")))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["loss"] is None and lines[0]["phase_seconds"]["wait"] == 0.25
    again = MetricsLog(tmp_path, 1)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2], "a trainer that cannot go on leaves its record as it is"
    again.append(record(2))
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_record_that_is_deleted_or_replaced_while_steps_are_taken_begins_again(tmp_path: Path) -> None:
    file = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(file.parent, 0)
    log.append(record(1))
    file.unlink()
    log.append(record(2))
    assert steps_in(file) == [2]
    file.rename(file.with_name("kept"))
    log.append(record(3))
    assert steps_in(file) == [3] and steps_in(file.with_name("kept")) == [2]
    shutil.rmtree(file.parent)
    log.append(record(4))
    assert steps_in(file) == [4]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError):
        log.append(record(5))
    file.unlink()
    log.append(record(6))
    assert steps_in(file) == [5, 6]


def test_scalars_leave_out_what_is_no_number() -> None:
    numbers = scalars(record(1, grad_norm=float("inf")))
    assert numbers["seconds/wait"] == 0.25 and numbers["train/reward_local"] == 0.5
    assert "train/grad_norm" not in numbers and "train/reward_external" not in numbers


@pytest.mark.parametrize(
    ("version", "pointer", "exhausted", "decision"),
    [
        (0, None, True, "hold"),
        (1, None, False, "publish"),
        (5, 4, False, "publish"),
        (5, 5, False, "confirm"),
        (3, 5, False, "hold"),
        (3, 5, True, "step_back"),
    ],
)
def test_older_policies_are_held_back_during_a_replay_and_published_only_when_the_log_ends_before_the_newer_one(
    version: int, pointer: int | None, exhausted: bool, decision: str
) -> None:
    assert publication(version, pointer, log_exhausted=exhausted) == decision
