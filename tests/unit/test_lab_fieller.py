"""Ratios with Fieller's intervals: against Student's interval of differences, and the figures that
docs/results.md gives.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.fieller import main
from lab.statistics import estimate, fieller_ratio

REPO = Path(__file__).parents[2]
RESULTS = "experiments/results"


def test_the_ends_are_where_students_interval_of_the_difference_reaches_zero() -> None:
    random = np.random.default_rng(3)
    for seeds in (3, 5, 10):
        base = list(random.normal(1.0, 0.1, size=seeds))
        arm = [1.5 * value + random.normal(0.0, 0.2) for value in base]
        found = fieller_ratio(arm, base)
        assert found is not None and found.low < found.ratio < found.high
        for end, sign in ((found.low, 1), (found.high, -1)):
            left = estimate([value - end * other for value, other in zip(arm, base, strict=True)])
            assert left.half_width is not None and left.mean == pytest.approx(sign * left.half_width, rel=1e-6)
    twice = fieller_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert twice is None  # By three such seeds the baseline may be 0.
    exact = fieller_ratio([2.0, 2.2, 2.4], [1.0, 1.1, 1.2])
    assert exact is not None and (exact.low, exact.ratio, exact.high) == pytest.approx((2.0, 2.0, 2.0))


def test_nothing_is_said_where_no_finite_interval_holds_the_ratio() -> None:
    assert fieller_ratio([1.0], [1.0]) is None
    assert fieller_ratio([1.0, 2.0, 1.5], [0.1, -0.1, 0.05]) is None
    assert fieller_ratio([1.0, 1.1, 0.9], [-1.0, -1.1, -0.9]) is None
    with pytest.raises(ValueError, match="needs both for each seed"):
        fieller_ratio([1.0, 2.0], [1.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "figures", "quoted"),
    [
        (["q8-evidence", "default/replay", "default/central"], ["1.81 to 2.34", "1.06 to 1.37"], True),
        (["q13-services", "4-4/8-0"], ["1.12 (0.87 to 1.45)"], True),
        (
            ["q13-services", "--equal-completions", "4-4/8-0", "4-4/4-0-replay"],
            ["1.63 (1.37 to 1.90)", "1.35 (0.94 to 2.30)"],
            True,
        ),
        (["q13-simulated", "--equal-completions", "4-4/8-0"], ["1.83 (1.06 to 2.49)"], False),
    ],
)
def test_the_page_of_results_gives_what_its_command_computes(
    asked: list[str], figures: list[str], quoted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    page = " ".join((REPO / "docs/results.md").read_text().split())
    name, *rest = asked
    assert main([str(REPO / RESULTS / name), *rest]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(figures)
    for line, figure in zip(printed, figures, strict=True):
        assert figure in line and figure in page
    command = f"python -m lab.fieller {RESULTS}/{name} {' '.join(sorted(rest, key=lambda word: word.startswith('--')))}"
    assert (command in page) == quoted, command


@pytest.mark.slow
def test_an_arm_that_is_not_there_is_an_error_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(REPO / RESULTS / "q13-simulated"), "4-4/9-9"]) == 1
    assert "'4-4/9-9' is not ARM/BASELINE of the arms that have complete runs: 4-4, 8-0, 4-0-replay" in capsys.readouterr().err
