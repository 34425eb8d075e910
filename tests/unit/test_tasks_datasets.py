"""reasoning-gym is imported without what it would draw with, and its tasks are the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
if sys.argv[1] == "with":
    import matplotlib.pyplot
from shared.contracts.messages import TaskRef
from shared.tasks.derive import dataset_names, derive_item
dataset_names()
there = "matplotlib" in sys.modules
tasks = [
    [item.task.text, item.task.answer, item.task.metadata]
    for dataset in ("game_of_life", "game_of_life_halting")
    for index in range(3)
    for item in [derive_item(TaskRef(dataset=dataset, config="{}", seed=5, index=index))]
]
import matplotlib.pyplot as plt
plt.switch_backend("Agg")
plt.plot([1, 2])
print(json.dumps([there, tasks]))
"""


def run(drawing: str) -> list[object]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, drawing], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
def test_tasks_of_cellular_automata_need_no_matplotlib_which_can_be_imported_afterwards() -> None:
    without, with_it = run("without"), run("with")
    assert without[0] is False and with_it[0] is True
    assert without[1] == with_it[1]
