"""Two evaluations of the same questions are compared question by question. The figures are those of
scipy 1.17.1: binomtest(k, n).pvalue and ttest_1samp(differences, 0).confidence_interval().
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shared.contracts.control import EvalReport
from shared.paired import Answer, paired, recorded_answers
from swarm_cli.observe.run_files import Evaluation, compared, read_evaluations
from swarm_cli.observe.snapshot import held_out_history
from swarm_cli.observe.verdict import Outcome, held_out_verdict, run_verdicts


def passes(newly_right: int, lost: int, kept: int = 0, n: int = 18) -> tuple[list[Answer], list[Answer]]:
    """Answers before and now, of which `kept` are right in both."""
    before = [*[False] * newly_right, *[True] * lost, *[True] * kept, *[False] * (n - newly_right - lost - kept)]
    now = [*[True] * newly_right, *[False] * lost, *[True] * kept, *[False] * (n - newly_right - lost - kept)]
    return [(float(each), each) for each in before], [(float(each), each) for each in now]


@pytest.mark.parametrize(
    ("newly_right", "lost", "p", "chance"),
    [(6, 0, 0.03125, 4), (5, 0, 0.0625, 5), (0, 6, 0.03125, 4), (9, 3, 0.1459961, 6), (10, 2, 0.0385742, 6), (0, 0, 1.0, 0),
     (60, 38, 0.0333600, 20), (500, 430, 0.0236088, 60)],
)  # fmt: skip
def test_the_sign_test_is_exact_and_chance_is_the_largest_difference_that_it_explains(
    newly_right: int, lost: int, p: float, chance: int
) -> None:
    n = max(18, newly_right + lost)
    found = paired(*passes(newly_right, lost, n=n))
    assert found is not None and (found.newly_right, found.lost) == (newly_right, lost)
    assert found.p == pytest.approx(p, abs=1e-6) and int(found.chance * n) == chance
    assert (abs(found.gain) > found.chance) == (p < 0.05)


def test_rewards_are_compared_by_the_interval_of_their_differences() -> None:
    before = [(each / 20, None) for each in range(20)]
    now = [(reward + (0.1 if place % 4 else -0.05), None) for place, (reward, _) in enumerate(before)]
    found = paired(before, now, by_reward=True)
    assert found is not None and found.gain == pytest.approx(0.0625)
    assert (found.gain - found.chance, found.gain + found.chance) == pytest.approx((0.0313, 0.0937), abs=1e-4)
    assert paired(before, now) is None, "no pass is defined"


def test_a_reward_that_is_unknown_in_one_alone_leaves_no_pairs_and_in_both_one_pair_less() -> None:
    """Else rates are of other questions than pairs: "learned: held-out 0.45, -0.05"."""
    before, now = passes(6, 0)
    found = paired([(None, None), *before[1:]], [(None, None), *now[1:]])
    assert found is not None and (found.n, found.newly_right) == (17, 5)
    assert paired([(None, None), *before[1:]], now) is None
    assert paired(before, now[:-1]) is None and paired([], []) is None


@pytest.mark.parametrize("reward", [10**400, -1.7e308, 2e9, float("nan"), True, "1"])
def test_answers_that_no_generator_writes_are_none(reward: Any) -> None:
    """A run that somebody else gave may hold anything."""
    assert recorded_answers({"answers": [[reward, None], [0.5, None]]}) == ()
    assert recorded_answers({"answers": [[0.25, None], [0.5, None]]}) == ((0.25, None), (0.5, None))


def test_rewards_that_change_by_nothing_that_is_shown_are_no_gain() -> None:
    before: list[Answer] = [(0.1, None)] * 20
    found = paired(before, [(0.1 + 1e-12, None)] * 20, by_reward=True)
    assert found is not None and abs(found.gain) < found.chance


def lines_of(before: list[Answer], now: list[Answer], **changes: Any) -> list[dict[str, Any]]:
    """Lines of `eval.jsonl` of a base policy, one in between, and the last."""
    rates = [sum(passed or 0 for _, passed in each) / len(each) for each in (before, now)]
    common = {"n": len(before), "held_out": "a" * 64, "scorer": "b" * 64} | changes
    return [
        {"policy_version": version, "pass_rate": rate, "mean_reward": rate, "time": 1.0 + version, "answers": answers, **common}
        for version, rate, answers in ((0, rates[0], before), (5, rates[0], before), (10, rates[1], now))
    ]


def written(folder: Path, lines: list[dict[str, Any]]) -> list[Evaluation]:
    folder.mkdir(exist_ok=True)
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_evaluations(folder)


def test_six_newly_right_and_none_lost_of_18_is_a_gain_and_is_told_so_everywhere(tmp_path: Path) -> None:
    lines = lines_of(*passes(6, 0, kept=6))
    known = written(tmp_path / "alpha", lines)
    (told,) = run_verdicts(tmp_path, ["alpha"])
    assert told == "alpha: learned: held-out 0.667, +0.333 over the base policy: 6 newly right, 0 lost (p 0.031)"
    assert [bool(each.answers) for each in known] == [True, False, True], "those in between are not kept"
    report = EvalReport(
        node="alpha", policy_version=10, created_at=11.0, n=18, pass_rate=12 / 18, mean_reward=12 / 18, per_task={}, seconds=1.0,
        held_out="a" * 64, scorer="b" * 64,
    )  # fmt: skip
    assert held_out_verdict(held_out_history(report, [report], known)).outcome is Outcome.LEARNED, "as while the run is running"
    without = written(tmp_path / "alpha", [{**line, "answers": None} for line in lines])
    assert held_out_verdict(without).outcome is Outcome.UNCLEAR and held_out_verdict(without).pairs is None


def test_a_change_that_chance_explains_and_a_fall_are_told_with_their_pairs(tmp_path: Path) -> None:
    unclear = held_out_verdict(written(tmp_path, lines_of(*passes(5, 1, kept=6))))
    assert unclear.outcome is Outcome.UNCLEAR and "5 newly right, 1 lost (p 0.22)" in unclear.words
    fell = held_out_verdict(written(tmp_path, lines_of(*passes(0, 6, kept=6))))
    assert fell.outcome is Outcome.FAILED and fell.words.endswith("from 0.667 to 0.333: 0 newly right, 6 lost (p 0.031)")
    other = lines_of(*passes(6, 0, kept=6))
    other[-1]["held_out"] = "c" * 64
    assert held_out_verdict(written(tmp_path, other)).pairs is None, "other questions are no pairs"


def test_mean_rewards_are_judged_where_each_questions_is_on_record(tmp_path: Path) -> None:
    random = Random(1)
    before: list[Answer] = [(random.random(), None) for _ in range(40)]
    now: list[Answer] = [((reward or 0.0) + random.uniform(0.0, 0.2), None) for reward, _ in before]
    known = written(tmp_path, lines_of(before, now, pass_rate=None))
    assert held_out_verdict(known).outcome is Outcome.LEARNED and "95 % interval +0." in held_out_verdict(known).words
    assert compared(known).newest is not None


def test_the_newest_versions_answers_count_also_where_a_slow_generator_wrote_a_lower_one_later(tmp_path: Path) -> None:
    base, between, newest = lines_of(*passes(6, 0, kept=6))
    known = written(tmp_path, [base, newest, between])
    assert held_out_verdict(known).outcome is Outcome.LEARNED and held_out_verdict(known).pairs is not None


def test_where_nothing_passes_rewards_that_fall_to_nothing_are_told(tmp_path: Path) -> None:
    before: list[Answer] = [(0.3 + each / 100, False) for each in range(20)]
    fell = lines_of(before, [(0.0, False)] * 20)
    for line, mean in zip(fell, (0.395, 0.395, 0.0), strict=True):
        line["mean_reward"] = mean
    assert held_out_verdict(written(tmp_path, fell)).outcome is Outcome.FAILED


@pytest.mark.parametrize("odd", ["1", [1], [[1, 1]], [[float("nan"), True]], [[1.0, True, 2]], [["1", True]], {"a": 1}])
def test_a_line_with_something_else_for_answers_has_no_pairs(odd: Any, tmp_path: Path) -> None:
    known = written(tmp_path, [{**line, "answers": odd} for line in lines_of(*passes(6, 0, kept=6))])
    assert [each.answers for each in known] == [()] * 3
