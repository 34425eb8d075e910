"""A row whose own reference answer earns nothing is left out and named, and a file of such rows is
refused.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shared.config import TaskSpec
from shared.rewards import Mark
from shared.runtime.exits import EXIT_CONFIG
from shared.tasks import HeldOut, TaskConfigError, TaskSource, check_specs, held_out_tasks
from shared.tasks.evaluation import PassRules
from shared.tasks.file_source import with_row_name
from shared.tasks.reference_checks import FILE_ROWS_CHECKED, Trial, Tried, left_out, looked_at, try_rewards
from shared.tasks.sandbox import ScorerPool
from shared.tasks.specs import file_questions, source_problems
from tests import forked

ROOT = Path(__file__).parents[2]

GSM8K = [
    {
        "question": f"Tom has {n} apples and buys 3. How many?",
        "answer": f"Tom has {n}+3=<<{n}+3={n + 3}>>{n + 3} apples.\n#### {n + 3}",
    }
    for n in range(8)
]
"""Rows as GSM8K is published."""


def source(folder: Path, rows: list[dict[str, Any]], verifier: str) -> TaskSpec:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskSpec(source="file", path=str(file), verifier=verifier)


def numbers(count: int, **others: Any) -> list[dict[str, Any]]:
    """Rows that are right, apart from `others` by their index: `_3="four"`."""
    return [{"question": f"q{n}", "answer": others.get(f"_{n}", n)} for n in range(count)]


def test_gsm8k_as_it_is_published_is_refused_for_exact_with_the_remedy_and_read_by_the_others(tmp_path: Path) -> None:
    with pytest.raises(TaskConfigError) as caught:
        check_specs([source(tmp_path, GSM8K, "exact")], 2)
    said = str(caught.value)
    assert "8 of its 8 rows" in said and "lines 1, 2, 3, 4, 5 and 3 more" in said
    assert "'3' is read as the answer" in said and "final_number or math" in said
    for verifier in ("final_number", "math"):
        (spec,) = check_specs([source(tmp_path, GSM8K, verifier)], 2)
        assert left_out(spec) == 0


@pytest.mark.slow
def test_config_check_refuses_gsm8k_under_the_default_verifier_and_names_single_rows_in_a_warning(tmp_path: Path) -> None:
    node, environment = tmp_path / "node.toml", {**os.environ, "SWARM_MODEL__PATH": str(ROOT / "models" / "base")}

    def checked(rows: list[dict[str, Any]]) -> tuple[int, str]:
        spec = source(tmp_path, rows, "exact")
        node.write_text(f'[eval]\ntasks = 2\n[[tasks]]\nsource = "file"\npath = "{spec.path}"\n')
        asked = ["config", "check", "--config", str(node)]
        done = forked.run("swarm_cli", asked, environment=environment, cwd=ROOT, timeout=180)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    code, said = checked(GSM8K)
    assert code == EXIT_CONFIG and "8 of its 8 rows" in said and "final_number or math" in said, said
    code, said = checked([*GSM8K[:1], *numbers(9)])
    assert code == 0 and "1 of its 10 rows" in said and "rows.jsonl: line 1: " in said, said


UNEARNABLE = [
    ("exact", "Half of it.\n#### 4"),
    ("exact", r"It is \boxed{4} in all"),
    ("exact", "<answer>4</answer>"),
    ("exact", "<think>4</think> 4"),
    ("exact", "<think>4"),
    ("exact", "a" + " " * 400 + "b"),
    ("final_number", "four"),
    ("final_number", "4 apples"),
    ("math", "3 hours 20 minutes"),
    ("math", "3:20"),
    ("math", "east"),
    ("math", "10^{10000}"),
]


@pytest.mark.parametrize(("verifier", "reference"), UNEARNABLE)
def test_a_row_that_nobody_can_earn_is_left_out_of_training_and_evaluation_and_named(
    tmp_path: Path, verifier: str, reference: str
) -> None:
    (spec,) = check_specs([source(tmp_path, numbers(9, _4=reference), verifier)], 3)
    (file,) = file_questions([spec], 3)
    assert (left_out(spec), looked_at(spec), file.questions) == (1, 9, 8)
    assert "1 of its 9 rows" in file.left_out[0] and "rows.jsonl: line 5: " in file.left_out[1] and len(file.left_out) == 2
    held = HeldOut(held_out_tasks([spec], 8))
    assert len(held.tasks) == 8 and not held.contains_text("q4")
    drawn = {
        task.ref.index for draw in range(60) for task in [next(TaskSource([spec], node="a", seed=0).candidates(draw, HeldOut([])))]
    }
    assert drawn == set(range(9)) - {4}


def test_rows_are_named_by_cause_the_first_few_and_their_number(tmp_path: Path) -> None:
    spec = source(tmp_path, numbers(40, **{f"_{n}": "four" for n in range(10, 18)}, _30="#### 4 apples"), "final_number")
    (file,) = file_questions(check_specs([spec], 2), 2)
    assert len(file.left_out) == 2 and "lines 11, 12, 13, 14, 15 and 4 more: " in file.left_out[1]


def test_of_a_large_file_other_rows_are_looked_at_when_they_are_first_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without time for more rows than those spread over the file, where one of two is bad here."""
    monkeypatch.setattr("shared.tasks.reference_checks.MORE_ROWS_S", 0.0)
    size = 2 * FILE_ROWS_CHECKED
    bad = {f"_{n}": "four" for n in (0, *range(1, 400, 2))}
    (spec,) = check_specs([source(tmp_path, numbers(size, **bad), "final_number")], 2)
    assert (left_out(spec), looked_at(spec)) == (1, FILE_ROWS_CHECKED), (
        "the rows with an odd index are between those that are looked at"
    )
    tasks = TaskSource([spec], node="a", seed=0)
    drawn = [next(tasks.candidates(draw, HeldOut([]))).ref.index for draw in range(300)]
    assert not {f"_{index}" for index in drawn} & set(bad)
    assert left_out(spec) > 5
    assert drawn == [next(TaskSource([spec], node="a", seed=0).candidates(draw, HeldOut([]))).ref.index for draw in range(300)]


@pytest.mark.slow
def test_all_bad_rows_of_a_large_file_of_numbers_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.tasks.reference_checks.MORE_ROWS_S", 120.0)  # however busy the machine is
    spec = source(tmp_path, numbers(10_000, **{f"_{n}": "four" for n in range(7, 10_000, 99)}), "final_number")
    (file,) = file_questions(check_specs([spec], 2), 2)
    assert "101 of its 10,000 rows" in file.left_out[0] and "lines 8, 107, 206, 305, 404 and 96 more" in file.left_out[1]


def test_a_dataset_whose_answers_the_verifier_does_not_pay_is_refused_and_one_of_few_such_items_is_drawn_without_them() -> None:
    (line,) = source_problems([TaskSpec(dataset="ab", verifier="final_number")])[1:]
    assert "needs a number" in line
    spec = TaskSpec(dataset="calendar_arithmetic", verifier="final_number")
    before, looked_at_before = left_out(spec), looked_at(spec)
    draws = [next(TaskSource([spec], node="a", seed=0).candidates(draw, HeldOut([]))) for draw in range(30)]
    assert all((task.answer or "").lstrip("-").isdigit() for task in draws) and left_out(spec) > before
    assert looked_at(spec) >= looked_at_before + len(draws)


@pytest.mark.slow
def test_each_row_is_tried_at_the_start_and_those_on_which_a_reward_fails_are_named_by_line(tmp_path: Path) -> None:
    rows = [{"question": f"{place}?", "answer": "none" if place in (40, 49) else str(place)} for place in range(50)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text("def whole(answer, reference):\n    return float(answer == str(int(reference)))\n")
    spec = with_row_name(TaskSpec(path=str(tmp_path / "q.jsonl"), reward=f"{tmp_path}/r.py:whole"))

    async def tried() -> list[Trial]:
        async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=4096, tasks=[spec]) as pool:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("shared.tasks.reference_checks.MORE_ROWS_S", 60.0)
                return await try_rewards(pool, [spec], PassRules([spec]), every_row=True)

    (trial,) = asyncio.run(tried())
    assert not trial.unusable and "q.jsonl: lines 41, 50 " in trial.problem and "ValueError" in trial.problem


def test_of_a_sum_of_rewards_a_value_for_what_passes_is_suggested() -> None:
    rewards = [{"use": "r.py:right", "weight": 2.0}, {"use": "r.py:short", "weight": 0.5}]
    spec = TaskSpec.model_validate({"path": "q.jsonl", "rewards": rewards})
    own = Tried(2.5, None, Mark.UNSAID, "", 0.1)
    assert "for example 2, what full marks of r.py:right alone earn" in Trial(spec, own, ()).no_pass
    alone = TaskSpec(path="q.jsonl", reward="r.py:right")
    assert "for example" not in Trial(alone, own, ()).no_pass
    plain, wrong = (Tried(reward, None, Mark.UNSAID, "", 0.1) for reward in (1.0, 0.0))
    assert Trial(alone, plain, (wrong,)).no_pass == "", "a plain reward needs no word"
