"""What `swarm eval` prints on standard output is its report and nothing else."""

from __future__ import annotations

import pytest

from shared.config import TaskSpec
from swarm_cli.model.evaluate import _held_out


def test_what_a_dataset_prints_while_it_makes_tasks_is_kept_from_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    _, tasks = _held_out([TaskSpec(dataset="bf")], 3, 0)
    printed = capfd.readouterr()
    assert len(tasks) == 3
    assert printed.out == ""
    assert printed.err, "the dataset prints nothing any more: this test needs another"
