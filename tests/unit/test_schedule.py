"""The order of the suite's files names files that there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.schedule import DEAREST, TOGETHER, dearest_first, piece

REPO = Path(__file__).parents[2]


@dataclass
class Item:
    nodeid: str


@pytest.mark.parametrize("name", [*DEAREST, *TOGETHER])
def test_every_name_is_that_of_a_file_or_folder_with_tests(name: str) -> None:
    found = REPO / name
    assert found.is_file() or list(found.glob("test_*.py"))


def test_the_dearest_come_first_and_a_file_keeps_its_order() -> None:
    last, first, second = (Item(name) for name in ("tests/unit/test_a.py::b", f"{DEAREST[1]}::z[a::b]", f"{DEAREST[1]}::a"))
    items: Any = [last, first, second]
    assert dearest_first(items) == [first, second, last]


def test_engines_are_shared_by_a_whole_folder() -> None:
    assert piece("tests/engines/test_engine_turns.py::test_it[a]") == "tests/engines"
    assert piece("tests/unit/test_schedule.py::test_it") == "tests/unit/test_schedule.py"


def test_files_that_render_all_manifests_are_one_piece_in_which_each_keeps_its_order() -> None:
    names = ("tests/k8s/test_render.py::b", "tests/k8s/test_semantics_pods.py::a", "tests/unit/test_a.py::a")
    assert [piece(name) for name in names] == ["tests/k8s/test_render.py"] * 2 + ["tests/unit/test_a.py"]
    items: Any = [Item(name) for name in names]
    assert dearest_first([items[2], *items[:2]]) == items
