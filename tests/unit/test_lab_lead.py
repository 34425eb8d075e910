"""One arm's lead over another by several measures: on runs small enough to check by hand, and the
figures of section 3 of docs/results.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.lead import Compared, Run, difference_text, gained, last_quarter, main, ratio_text, reached, shares
from lab.measures import measures

REPO = Path(__file__).parents[2]
RECORDS = "experiments/results/q8-evidence"


def run_of(generated: int, rates: list[float]) -> Run:
    """A node that makes so many completions in each of four rounds and trains on one group with an
    advantage, with a held-out pass rate in rounds 0, 2 and 4.
    """
    steps = [
        {"kind": "step", "round": number, "node": "n00", "generated": generated, "updated": True, "informative_local": 1}
        for number in range(1, 5)
    ]
    evaluations = [
        {"kind": "eval", "round": number, "node": "n00", "pass_rate": rate, "mean_reward": rate, "tasks": {"gcd": [10, rate, rate]}}
        for number, rate in zip((0, 2, 4), rates, strict=True)
    ]
    return Run(measures([*steps, *evaluations]), steps, {"gcd": 10})


def test_two_arms_are_measured_where_both_have_made_as_many_completions() -> None:
    """The first has made the second's 40 completions after half of its rounds."""
    compared = Compared([(run_of(20, [0.1, 0.3, 0.9]), run_of(10, [0.1, 0.2, 0.3]))])
    assert compared.values(lambda run, end: end) == ([2.0], [4.0])
    assert compared.values(lambda run, end: end, 0.5) == ([1.0], [2.0])
    final = compared.means(lambda run, end: reached(run.measures.held_out_screened, end))
    assert final == pytest.approx((0.2, 0.2))
    gain = compared.means(lambda run, end: gained(run.measures.held_out_screened, end))
    assert gain == pytest.approx((0.1, 0.1))
    assert compared.means(lambda run, end: last_quarter(run.measures.held_out, end)) == pytest.approx((0.9, 0.3))


def test_work_is_counted_up_to_where_the_comparison_ends_also_within_a_round() -> None:
    run = run_of(20, [0.1, 0.3, 0.9])
    assert run.work(4.0, ("updated",)) == 4.0
    assert run.work(2.5, ("updated", "informative_local")) == pytest.approx(5.0)
    assert run.work(0.0, ("updated",)) == 0.0


def test_the_parts_of_a_lead_add_up_and_weigh_each_dataset_by_its_questions() -> None:
    parts = shares({"gcd": 0.1, "lcm": 0.4, "bf": -0.1}, {"gcd": 10, "lcm": 20, "bf": 10})
    assert list(parts) == ["lcm", "gcd", "bf"]
    assert parts == pytest.approx({"lcm": 1.0, "gcd": 0.125, "bf": -0.125})


def test_a_ratio_comes_with_the_seeds_that_are_ahead_and_its_p() -> None:
    text = ratio_text([0.20, 0.22, 0.19, 0.25], [0.10, 0.11, 0.11, 0.12])
    assert text.startswith("1.95 (") and text.endswith("ahead on 4 of 4 seeds, p 0.125 uncorrected")


def test_a_difference_comes_with_students_interval_where_there_is_more_than_one_seed() -> None:
    assert difference_text([0.3, 0.4], [0.1, 0.1]) == "+0.2500 ± 0.6353"  # 12.706 · 0.1/√2 /√2
    assert difference_text([0.3], [0.4]) == "-0.1000"
    assert ratio_text([0.2, 0.3], [0.1, -0.1]).startswith("no ratio can be bounded, ahead on 2 of 2 seeds")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([str(REPO / RECORDS), *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "figures", "quoted"),
    [
        (
            ["default/central"],
            [
                "101 1.22, 102 1.61, 103 0.97, 104 1.31, 105 1.63, 106 1.04, 107 1.13, 108 0.99, 109 1.36, 110 1.08",
                "groups with an advantage: 6,308 and 676, 9.3 times as many",
                "updates: 1,017 and 158, 6.4 times as many",
                "whole runs: binary_matrix 41 %, fraction_simplification 24 %, basic_arithmetic 20 %, base_conversion 16 %,",
                "cumulative gain: binary_matrix 60 %, basic_arithmetic 23 %, base_conversion 18 %,",
            ],
            [
                "on 9.3 times as many groups with an advantage (6,308, 676)",
                "in 6.4 times as many updates",
                "as in the table above | 41 % | 36 % | 24 % |",
                "as the ratio 1.20 | 60 % | 41 % | 0 % |",
            ],
        ),
        (
            ["default/central-positives"],
            [
                "half of these completions: 0.97 (0.86 to 1.10), ahead on 4 of 10 seeds, p 0.650",
                "minus the base policy's: 1.14 (1.04 to 1.26), ahead on 10 of 10 seeds, p 0.002",
            ],
            [
                "the same at half of the completions | 0.97 (0.86 to 1.10) | 4 of 10 | 0.65 |",
                "final pass rate minus base | 1.14 (1.04 to 1.26) | 10 of 10 | 0.002 |",
            ],
        ),
        (
            ["default/central-positives", "--without", "binary_matrix"],
            ["cumulative gain: 1.13 (1.06 to 1.21), ahead on 10 of 10 seeds"],
            ["without binary_matrix | 1.13 (1.06 to 1.21) | 10 of 10 |"],
        ),
        (
            ["central-positives/central", "--of", "default/central"],
            [
                "cumulative gain: 1.11 (0.97 to 1.29), ahead on 7 of 10 seeds, p 0.105 uncorrected",
                "difference: +0.0153 ± 0.0197",
                "as a part of the difference of default/central: 0.57 (-0.32 to 1.20)",
            ],
            [
                "| one policy suffers from its wrong answers | not shown: without them",
                "1.11 times as much (0.97 to 1.29 by Fieller's method; difference 0.015 ± 0.020, ahead on 7 of 10 seeds, p 0.11",
            ],
        ),
    ],
)
def test_the_page_of_results_gives_what_the_command_prints(
    asked: list[str], figures: list[str], quoted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = " ".join((REPO / "docs/results.md").read_text().split())
    assert f"python -m lab.lead {RECORDS} {' '.join(asked)}" in page
    lines = printed(capsys, *asked)
    assert [figure for figure in figures if figure not in lines] == []
    assert [figure for figure in quoted if figure not in page] == []


@pytest.mark.slow
def test_an_arm_without_runs_is_an_error_that_names_those_with_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(REPO / RECORDS), "default/alone"]) == 1
    assert "'alone' is no arm that has complete runs; compare two as ARM/BASELINE of 2-0, 4-4, " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "figures"),
    [
        (["q8-evidence", "default/replay", "default/central"], ["2.05 (1.81 to 2.34)", "1.20 (1.06 to 1.37)"]),
        (["q13-services", "4-4/8-0", "4-4/4-0-replay"], ["1.12 (0.87 to 1.45)", ""]),
        (["q13-services", "4-4/8-0", "4-4/4-0-replay", "--equal-completions"], ["1.63 (1.37 to 1.90)", "1.35 (0.94 to 2.30)"]),
        (["q13-simulated", "4-4/8-0", "4-4/4-0-replay", "--equal-completions"], ["1.83 (1.06 to 2.49)", "1.43"]),
    ],
)
def test_the_page_of_results_gives_the_ratios_of_several_pairs(
    asked: list[str], figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = " ".join((REPO / "docs/results.md").read_text().replace("**", "").split())
    name, *rest = asked
    assert main([str(REPO / "experiments/results" / name), *rest]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(figures) == 2
    assert all(figure in line and figure in page for line, figure in zip(lines, figures, strict=True))
    assert name == "q13-simulated" or f"python -m lab.lead experiments/results/{' '.join(asked)}" in page
