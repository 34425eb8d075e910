"""How often the border takes groups of one row of a file from one sender."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.verifier.border import Candidate, Refusal, Refused
from services.verifier.copies import REMEMBERED_S
from shared.config import TaskSpec
from shared.contracts.messages import Task, TaskRef
from shared.tasks.derive import derive_task
from shared.tasks.file_source import load_rows
from shared.tasks.sandbox import JobResult
from tests.unit.test_border import NOW_S, border
from tests.unit.test_border_copies import COPIER, SHORT, VICTIM, reason, saying, show, take


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Task]:
    """Tasks of a file that the node holds: `rows(seed, index)`."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"question": "row {number}", "answer": "4"}}\n' for number in range(20)))
    name = load_rows(TaskSpec(source="file", path=str(file))).name
    return lambda seed, index=7: derive_task(TaskRef(dataset=name, seed=seed, index=index))


def test_a_row_of_a_file_under_ever_other_seeds_is_taken_twice_with_the_same_answers_and_nobody_is_blamed(
    tmp_path: Path, rows: Callable[..., Task]
) -> None:
    gate = border(tmp_path, accept="any")
    verdicts = [show(gate, saying(SHORT, task=rows(seed)), COPIER, seed) for seed in range(2)]
    assert [reason(verdict) for verdict in verdicts] == [None, None]
    for seed in range(2):
        take(gate, saying(SHORT, task=rows(seed)), COPIER)
    again = [show(gate, saying(SHORT[::-1], task=rows(1000 + seed)), COPIER) for seed in range(40)]
    assert {(reason(verdict), verdict.blamed) for verdict in again if isinstance(verdict, Refused)} == {(Refusal.REPEATED, None)}
    assert len([verdict for verdict in again if isinstance(verdict, Refused)]) == 40
    assert reason(show(gate, saying(SHORT, task=rows(3, 8)), COPIER)) is None, "another row"
    assert reason(show(gate, saying(SHORT, node="gamma", task=rows(5)), VICTIM)) is None, "another sender with a settled policy"
    later = NOW_S + REMEMBERED_S + 1
    assert reason(show(gate, saying(SHORT, task=rows(6), created_at=later), COPIER, now_s=later)) is None, "an epoch later"


def test_a_row_comes_in_sixteen_times_an_hour_from_one_sender_whatever_it_says(tmp_path: Path, rows: Callable[..., Task]) -> None:
    gate = border(tmp_path, accept="any")
    for seed in range(16):
        take(gate, saying([f"<answer>{seed}{number}</answer>" for number in range(4)], task=rows(seed)), COPIER)
    assert reason(show(gate, saying(["others"] * 4, task=rows(99)), COPIER)) is Refusal.REPEATED
    assert reason(show(gate, saying(["others"] * 4, node="gamma", task=rows(99)), VICTIM)) is None


def test_a_refused_row_says_how_many_are_taken_and_that_more_rows_help(tmp_path: Path, rows: Callable[..., Task]) -> None:
    gate = border(tmp_path, accept="any")
    for seed in range(16):
        take(gate, saying([f"<answer>{seed}{number}</answer>" for number in range(4)], task=rows(seed)), COPIER)
    often = show(gate, saying(["others"] * 4, task=rows(99)), COPIER)
    for seed in range(2):
        take(gate, saying(SHORT, task=rows(seed, 8)), COPIER)
    alike = show(gate, saying(SHORT, task=rows(99, 8)), COPIER)
    assert isinstance(often, Refused) and isinstance(alike, Refused)
    assert "16 groups of this row of a file were accepted from this sender within 60 minutes" in often.detail
    assert "2 groups of this row of a file with these answers were accepted" in alike.detail
    for refused in (often, alike):
        assert "no reason for a ban" in refused.detail and "more rows" in refused.detail


def test_a_used_up_row_is_taken_again_an_hour_after_its_first_groups(tmp_path: Path, rows: Callable[..., Task]) -> None:
    gate = border(tmp_path, accept="any")

    def group(seed: int, now_s: float) -> Candidate | Refused:
        made = saying([f"<answer>{seed}{number}</answer>" for number in range(4)], task=rows(seed), created_at=now_s)
        return show(gate, made, COPIER, now_s=now_s)

    def sent(first_seed: int, now_s: float) -> int:
        """Count how many of forty groups, a second apart, are accepted."""
        count = 0
        for number in range(40):
            verdict = group(first_seed + number, now_s + number)
            if isinstance(verdict, Candidate):
                assert gate.conclude(verdict, JobResult([0.5] * 4, None, None, "", 0, 0.1), now_s + number) is None
                count += 1
        return count

    assert sent(0, NOW_S) == 16
    assert sent(100, NOW_S + REMEMBERED_S / 2) == 0
    assert sent(200, NOW_S + REMEMBERED_S + 1) == 16
