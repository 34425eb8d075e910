"""The memory of accepted groups: bounded by count and age, and no instant at which a kill loses
what it needs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.verifier import copies
from services.verifier.copies import ReplayMemory

ROOT = Path(__file__).parents[2]
KEEP_S = 60.0


def an_id(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def few_spare_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(copies, "_SPARE_LINES", 8)
    yield


@pytest.mark.usefixtures("few_spare_lines")
def test_the_file_stays_small_while_the_process_runs_and_every_young_id_is_known(tmp_path: Path) -> None:
    file = tmp_path / "accepted.txt"
    memory = ReplayMemory(100, file, keep_s=KEEP_S)
    for second in range(2000):
        memory.remember(an_id(second), float(second))
        assert file.stat().st_size < 80 * (2 * (KEEP_S + 2) + 8 + 2)
    assert len(memory) <= KEEP_S + 2
    again = ReplayMemory(100, file, keep_s=KEEP_S, now_s=2000.0)
    assert all(again.contains(an_id(second)) for second in range(2000 - int(KEEP_S), 2000))
    assert not again.contains(an_id(100))


@pytest.mark.usefixtures("few_spare_lines")
def test_the_count_bounds_the_file_too(tmp_path: Path) -> None:
    file = tmp_path / "accepted.txt"
    memory = ReplayMemory(50, file)
    for number in range(1000):
        memory.remember(an_id(number), 1.0)
    assert len(memory) == 50
    assert file.stat().st_size < 80 * (2 * 50 + 8 + 2)
    assert all(ReplayMemory(50, file).contains(an_id(number)) for number in range(950, 1000))


def test_a_line_that_a_killed_process_did_not_finish_swallows_no_other(tmp_path: Path) -> None:
    file = tmp_path / "accepted.txt"
    file.write_text("".join(f"{an_id(number)} {int(time.time())}\n" for number in range(5)) + "torn" + an_id(6)[:20])
    memory = ReplayMemory(100, file, keep_s=KEEP_S)
    assert all(memory.contains(an_id(number)) for number in range(5))
    memory.remember(an_id(7), time.time())
    assert all(ReplayMemory(100, file, keep_s=KEEP_S).contains(an_id(number)) for number in (0, 4, 7)), "not glued to the torn line"
    memory.remember(an_id(8), time.time() + 2 * KEEP_S)
    assert not memory._ids.keys() & {an_id(number) for number in range(5)}


def test_a_restart_knows_what_every_replica_of_the_folder_has_accepted(tmp_path: Path) -> None:
    """Also from the one file of earlier versions, which all replicas shared, and of a replica that
    is no more.
    """
    (tmp_path / "accepted.txt").write_text(f"{an_id(0)} 100\n")
    files = [tmp_path / f"accepted-{number}.txt" for number in range(3)]
    memories = [ReplayMemory(100, file, tmp_path.glob("accepted*.txt"), keep_s=KEEP_S, now_s=100.0) for file in files[:2]]
    for number, memory in enumerate(memories):
        memory.remember(an_id(10 + number), 101.0 + number)
    again = ReplayMemory(2, files[2], tmp_path.glob("accepted*.txt"), keep_s=KEEP_S, now_s=120.0)
    assert [again.contains(an_id(number)) for number in (0, 10, 11)] == [False, True, True], "the newest, of whichever file"
    again = ReplayMemory(100, files[0], tmp_path.glob("accepted*.txt"), keep_s=KEEP_S, now_s=100.0 + KEEP_S + 1.5)
    assert [again.contains(an_id(number)) for number in (0, 10, 11)] == [False, False, True]
    assert all(file.exists() for file in (tmp_path / "accepted.txt", *files[:2]))
    ReplayMemory(100, files[0], tmp_path.glob("accepted*.txt"), keep_s=KEEP_S, now_s=time.time() + KEEP_S + 10)
    assert [file.exists() for file in (tmp_path / "accepted.txt", *files[:2])] == [False, True, False], "its own stays"


def test_a_disk_that_takes_nothing_does_not_stop_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing fails in its place, since a full disk cannot be had in a test without being root."""
    memory = ReplayMemory(10, tmp_path / "accepted.txt")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory, "_append", full)
    memory.remember(an_id(1), 1.0)
    assert memory.contains(an_id(1))


CHILD = """
import sys, time
from pathlib import Path
from services.verifier import copies
copies._SPARE_LINES = 4
name = int(sys.argv[2])
file = Path(sys.argv[1])
memory = copies.ReplayMemory(100_000, file, file.parent.glob("accepted*.txt"), keep_s=30.0, now_s=100 * (time.time() % 1e6))
number = 0
while True:
    number += 1
    now_s = 100 * (time.time() % 1e6)  # a hundred times as fast, so that the file is written again every fraction of a second
    memory.remember(f"{name:032x}{number:032x}", now_s)
    print(number, now_s, flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_instant_two_replicas_lose_no_id_that_is_young_enough_to_matter(tmp_path: Path) -> None:
    files = [tmp_path / f"accepted-{number}.txt" for number in range(2)]
    inodes: set[int] = set()
    checked = 0
    for life in range(4):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(files[number]), str(10 * life + number)],
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                text=True,
            )
            for number in range(2)
        ]
        told: list[list[tuple[int, float]]] = []
        try:
            for child in children:
                assert child.stdout is not None
                assert child.stdout.readline(), "it runs"
            deadline = time.monotonic() + 0.7 + 0.1 * life
            while time.monotonic() < deadline:
                inodes.add(files[0].stat().st_ino)
                time.sleep(0.01)
        finally:
            for child in children:
                child.send_signal(signal.SIGKILL)
        for child in children:
            assert child.stdout is not None
            lines = [line.split() for line in child.stdout.read().splitlines()]
            told.append([(int(words[0]), float(words[1])) for words in lines if len(words) == 2 and "." in words[1]])
            child.wait()
        newest = max(at for child_counts in told for _, at in child_counts)
        found = ReplayMemory(100_000, tmp_path / "accepted-new.txt", files)
        for number, child_counts in enumerate(told):
            young = [count for count, at in child_counts[:-1] if at > newest - 25.0]
            missing = [count for count in young if not found.contains(f"{10 * life + number:032x}{count:032x}")]
            assert not missing, (life, number, missing[:5], young[-1])
            checked += len(young)
    assert checked > 20
    assert len(inodes) > 2, "it was written again while it was killed"
