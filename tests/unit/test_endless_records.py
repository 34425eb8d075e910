"""Files of a run's folder that are longer than memory, such as one of holes that somebody handed
on, are read within bounds, and what is in them counts.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from services.trainer.checkpoint import MANIFEST, CheckpointError, CheckpointStore
from services.verifier.copies import ReplayMemory
from services.verifier.trust import KnownKeys
from shared.plain_files import whole_lines
from swarm_cli.rollouts.records import TrainedRecords

HOLES_BYTES = 2**29
MOST_BYTES = 200 * 2**20
ID = "ab" * 32


def with_holes(file: Path, line: str) -> Path:
    """The line, at the end of a file that takes no room."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as written:
        written.truncate(HOLES_BYTES)
        written.seek(HOLES_BYTES)
        written.write(f"\n{line}\n".encode())
    return file


def trained(folder: Path) -> bool:
    line = '{"step":7,"time":1.0,"updated":true,"updates":1,"groups":[]}'
    step = TrainedRecords(with_holes(folder / "trained.jsonl", line).parent).for_step(7)
    return step is not None and step.updated


def known_keys(folder: Path) -> bool:
    return KnownKeys(with_holes(folder / "known_keys.txt", "beta UBETA 5 1"), ("alpha", "U")).key_of("beta") == "UBETA"


def accepted_groups(folder: Path) -> bool:
    return ReplayMemory(100, with_holes(folder / "accepted_groups.txt", f"{ID} 5")).contains(ID)


def manifest(folder: Path) -> bool:
    with_holes(folder / "step-00000003" / MANIFEST, "")
    with_holes(folder / "best.json", "")
    store = CheckpointStore(folder, keep=1, keep_best=True)
    with pytest.raises(CheckpointError, match="manifest is missing or broken"):
        store.read(3)
    return store.best() is None


@pytest.mark.slow
@pytest.mark.parametrize("read", [trained, known_keys, accepted_groups, manifest])
def test_an_endless_file_is_read_within_bounds(tmp_path: Path, read: Callable[[Path], bool]) -> None:
    tracemalloc.start()
    try:
        assert read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_lines_are_read_in_blocks_and_one_without_an_end_waits_for_it(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo\nthree\nmuch too long a line\nfour\nfi")
    with file.open("rb") as opened:
        found = list(whole_lines(opened, 4, 10))
    assert b"".join(block for block, _ in found).split(b"\n")[:2] == [b"two", b"three"]
    assert found[-1][0].endswith(b"four\n") and found[-1][1] == file.stat().st_size - len(b"fi")
    with file.open("rb") as opened:
        assert list(whole_lines(opened, found[-1][1], 10)) == []
