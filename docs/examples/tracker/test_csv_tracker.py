"""`pytest test_csv_tracker.py`, in the environment that the example is installed in."""

from __future__ import annotations

from pathlib import Path

from swarm_example_tracker import open_tracker

from services.trainer.tracking.base import TrackedRun


def run_at(folder: Path, step: int) -> TrackedRun:
    places = {"run_dir": folder, "shared_dir": folder}
    return TrackedRun(name="dev-alpha", id="1", step=step, project="swarm", online=False, options={"columns": "a b"}, **places)


def test_a_row_a_step_and_steps_that_are_trained_again_are_there_once(tmp_path: Path) -> None:
    first = open_tracker(run_at(tmp_path, 0))
    for step in (1, 2, 3):
        first.log({"a": step / 2, "other": 1.0}, step)
    first.close()
    again = open_tracker(run_at(tmp_path, 2))
    again.log({"a": 9.0, "b": 8.0}, 3)
    again.close()
    assert (tmp_path / "steps.csv").read_text().splitlines() == ["step,a,b", "1,0.5,", "2,1,", "3,9,8"]
