"""The benchmarks' arithmetic and their table; what they measure is not tested here, it depends on
the machine.
"""

from __future__ import annotations

import asyncio
import json
import runpy
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import beside_trl
from benchmarks.measuring import Result, in_turns, quotients
from benchmarks.table import markdown, ratio_text, sides_text
from benchmarks.waiting import result_of, wait_share
from shared.config import load_config
from shared.tasks import held_out_tasks
from shared.tasks.file_source import with_row_name
from tests.chaos.figures import Row, page

REPO = Path(__file__).resolve().parents[2]

RESULT = Result(
    row="a-row",
    measured="product | with a bar in its name",
    against="plain",
    workload="ten of them",
    unit="tokens/s",
    ratios=[0.8, 1.2, 0.95],
    bar=0.9,
    direction="at least",
    product=1234.0,
    plain=1300.0,
    remarks=["a remark"],
)


def written(*results: Result, failures: dict[str, str] | None = None) -> str:
    return markdown(results, failures or {}, "0123456789ab")


def test_the_page_names_the_commit_that_was_measured() -> None:
    assert "1 of 1 bars met, at commit 0123456789ab." in written(RESULT)


def test_the_page_of_the_chaos_suite_names_the_commits_of_its_rows_and_rows_of_before_that_have_none() -> None:
    rows = {
        fault: {**asdict(Row(fault=fault, injected=1)), "measured_at": 0.0} | commit
        for fault, commit in (("kill", {"commit": "0123456789ab"}), ("pause", {}))
    }
    assert " Commit: 0123456789ab, not recorded.\n" in page(rows)


def test_ratios_are_taken_pair_by_pair() -> None:
    assert quotients([10.0, 30.0], [5.0, 60.0]) == [2.0, 0.5]


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0])])
def test_turns_that_give_no_ratio_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError):
        quotients(ours, theirs)


def test_the_median_decides_in_the_bars_direction() -> None:
    assert RESULT.ratio == 0.95
    assert RESULT.met
    assert not replace(RESULT, bar=0.96).met
    assert not replace(RESULT, direction="at most").met
    assert replace(RESULT, direction="at most", bar=0.96).met
    assert replace(RESULT, bar=0.95).met and replace(RESULT, bar=0.95, direction="at most").met


def test_both_sides_take_turns_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    async def product(turn: int) -> float:
        order.append(f"A{turn}")
        return 10.0 + turn

    async def plain(turn: int) -> float:
        order.append(f"B{turn}")
        return 20.0 + turn

    ours, theirs = asyncio.run(in_turns(product, plain, pairs=3, warm_up=1))
    assert order == ["B0", "A0", "A1", "B1", "B2", "A2", "A3", "B3"]
    assert (ours, theirs) == ([11.0, 12.0, 13.0], [21.0, 22.0, 23.0])


def test_the_table_shows_median_spread_bar_and_verdict() -> None:
    text = written(RESULT, replace(RESULT, row="slow", ratios=[0.1]))
    (line,) = [line for line in text.splitlines() if line.startswith("| a-row")]
    assert "0.95 (0.80 to 1.20, n=3)" in line and "at least 0.90" in line and line.endswith("| met |")
    assert "1,234 vs 1,300 tokens/s" in line
    assert "product \\| with" in line, "a bar inside a cell would end it"
    (slow,) = [line for line in text.splitlines() if line.startswith("| slow")]
    assert slow.endswith("| **not met** |")
    assert "1 of 2 bars met" in text and "- processor: " in text and "- a remark" in text


def test_a_row_that_could_not_be_measured_is_listed_as_not_met() -> None:
    text = written(RESULT, failures={"broken": "not done within 5 s"})
    (line,) = [line for line in text.splitlines() if line.startswith("| broken")]
    assert "not done within 5 s" in line and line.endswith("| **not met** |")
    assert "1 of 2 bars met" in text


def test_a_verdict_and_its_ratio_never_disagree_on_the_edge() -> None:
    just_below = replace(RESULT, ratios=[0.899])
    assert not just_below.met
    assert ratio_text(just_below).startswith("0.899 ")


def test_one_turn_alone_has_no_range() -> None:
    assert ratio_text(replace(RESULT, ratios=[0.1])) == "0.10 (n=1)"
    assert ratio_text(replace(RESULT, ratios=[0.1, 0.3, 0.2])).endswith(" (0.10 to 0.30, n=3)")


def test_one_side_alone_is_shown_alone() -> None:
    assert sides_text(replace(RESULT, plain=None)) == "1,234 tokens/s"


def test_the_share_waited_is_that_of_all_seconds() -> None:
    phases = [{"wait": 1.0, "forward_backward": 1.0}, {"wait": 0.0, "forward_backward": 2.0}]
    assert wait_share(phases) == 0.25
    result = result_of(phases * 5, cores=2)
    assert result.ratio == 0.25 and result.met
    assert not result_of([{"wait": 3.0, "forward_backward": 1.0}] * 5, cores=2).met


@pytest.mark.slow
def test_trl_is_not_shown_what_swarm_holds_out_and_both_can_read_the_rows_and_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside_trl.write_rows(tmp_path)
    lines = beside_trl.write_files(tmp_path, Path("models/base").absolute(), steps=2, asked=16, seed=1)
    beside_trl.hold_out(tmp_path, 16)
    monkeypatch.chdir(tmp_path)
    shown, rows = (
        {line["prompt"][0]["content"]: line["answer"] for line in map(json.loads, Path(name).read_text().splitlines())}
        for name in ("train.jsonl", "questions.jsonl")
    )
    tasks = held_out_tasks([with_row_name(spec) for spec in load_config(Path("node.toml")).tasks], 16)
    assert {task.prompt[-1].parts[0].text for task in tasks} == rows.keys() - shown.keys()
    assert len(rows) - len(shown) == 16
    reward = runpy.run_path("rewards.py")["accuracy"]
    said = [[{"role": "assistant", "content": text}] for text in ("It is 12.", "12 or 13", "none")]
    assert reward(said, answer=["12"] * 3) == [1.0, 0.0, 0.0]
    speed = " ".join((REPO / "docs" / "speed.md").read_text().split())
    assert f"one setting a line | {lines['Swarm']} | {lines['TRL']} |" in speed
