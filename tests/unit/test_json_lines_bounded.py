"""A bounded file of lines keeps the newest, whole ones, whatever happens while it is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shared.run_records import BoundedLines, older, read_bounded
from tests.full_disk import no_file_above


def numbers(path: Path) -> list[int]:
    return [line["n"] for line in read_bounded(path)]


def test_the_oldest_go_when_it_is_full_and_it_never_takes_more_than_twice_its_size(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trained.jsonl"
    lines = BoundedLines(path, 300)
    for number in range(100):
        lines.append(json.dumps({"n": number, "filling": "x" * 30}))
        assert sum(file.stat().st_size for file in path.parent.iterdir()) <= 600
    kept = numbers(path)
    assert kept == list(range(kept[0], 100)) and len(kept) > 5 and older(path).exists()
    lines.append(json.dumps({"n": 100, "filling": "x" * 300}))
    assert numbers(path) == kept, "a line that no file can hold is left out"


def test_a_torn_line_costs_itself_alone_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    first = BoundedLines(path, 1000)
    first.append('{"n": 1}')
    with path.open("a") as torn:
        torn.write('{"n": 2, "kil')
    BoundedLines(path, 1000).append('{"n": 3}')
    assert numbers(path) == [1, 3]


def test_a_full_disk_leaves_no_torn_line_and_the_next_one_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    lines = BoundedLines(path, 1000)
    lines.append('{"n": 1}')
    with no_file_above(12), pytest.raises(OSError):
        lines.append('{"n": 2}')
    lines.append('{"n": 3}')
    assert numbers(path) == [1, 3]


def test_lines_after_the_file_was_deleted_or_replaced_are_in_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trained.jsonl"
    lines = BoundedLines(path, 1000)
    lines.append('{"n": 1}')
    path.unlink()
    lines.append('{"n": 2}')
    assert numbers(path) == [2]
    shutil.rmtree(path.parent)
    lines.append('{"n": 3}')
    assert numbers(path) == [3]
