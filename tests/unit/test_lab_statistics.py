"""An experiment's figures: intervals, measures of a run's records, and the report that is made of
them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.measures import measures
from lab.records import RecordWriter, read_records, rounded
from lab.report import write_report
from lab.runs import finished_runs, run_folder, runs_to_make, write_manifest
from lab.spec import SpecError, parse_spec
from lab.statistics import area_under, fieller_ratio, paired_differences, paired_ratios, value_at
from shared.intervals import estimate, t_quantile

pytestmark = pytest.mark.usefixtures("without_plots")


def test_the_interval_is_students() -> None:
    # Mean 2, standard deviation 1, three values: 4.303 / sqrt(3) on either side.
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert estimate([5.0]).half_width is None
    assert t_quantile(40) == pytest.approx(2.021, abs=1e-3)
    assert t_quantile(120) == pytest.approx(1.980, abs=1e-3)


def test_pairs_are_by_seed_and_ratios_need_a_positive_base() -> None:
    assert paired_differences({1: 3.0, 2: 5.0, 9: 1.0}, {2: 1.0, 1: 1.0}) == [2.0, 4.0]
    assert paired_ratios({1: 3.0, 2: 5.0}, {1: 2.0, 2: 2.0}) == [1.5, 2.5]
    assert paired_ratios({1: 3.0, 2: 5.0}, {1: 2.0, 2: 0.0}) == []


def test_series_are_measured_between_their_points() -> None:
    assert area_under([(0.0, 0.0), (2.0, 2.0), (4.0, 2.0)]) == 6.0
    assert [value_at([(0.0, 0.0), (2.0, 4.0)], x) for x in (-1.0, 1.0, 9.0)] == [0.0, 2.0, 4.0]


def write_run(file: Path, level: float, generated: int, rounds: int = 40, nodes: int = 2) -> None:
    """A run whose trained reward is `level` and whose held-out pass rate rises by it over the
    run.
    """
    writer = RecordWriter(file)
    for number in range(rounds + 1):
        for node in range(nodes):
            name = f"n{node:02d}"
            if number:
                writer.write("step", round=number, node=name, trained_reward=level, local_reward=level / 2, generated=generated)
            if number % 2 == 0:
                rate = 0.1 + level * number / rounds
                writer.write(
                    "eval", round=number, node=name, n=10, pass_rate=rate, mean_reward=rate, tasks={"gcd": [10, rate, rate]}
                )
        writer.write("round", round=number, seconds={"all": 0.5})
    writer.close()


def test_numbers_of_a_run_follow_from_its_records(tmp_path: Path) -> None:
    write_run(tmp_path / "r.gz", level=0.2, generated=8)
    numbers = measures(read_records(tmp_path / "r.gz")).numbers
    assert numbers["trained_total"] == pytest.approx(2 * 40 * 0.2)
    assert numbers["local_total"] == pytest.approx(2 * 40 * 0.1)
    assert numbers["base"] == pytest.approx(0.1)
    assert numbers["gain"] == pytest.approx(0.1)
    assert numbers["completions"] == 2 * 40 * 8
    assert numbers["seconds"] == pytest.approx(41 * 0.5)


def spec_source(**changes: Any) -> dict[str, Any]:
    arms = {"8-0": {}, "4-4": {}}
    return {"name": "x", "seeds": [1, 2], "rounds": 3, "nodes": 2, "tasks": [{"dataset": "gcd"}], "arms": arms, **changes}


@pytest.mark.slow
def test_a_report_says_what_of_hostile_text_got_through(tmp_path: Path) -> None:
    spec = parse_spec(
        {"name": "x", "seeds": [1], "tasks": [{"dataset": "gcd"}], "nodes": 2, "rounds": 4, "arms": {"a": {}, "b": {}}}
    )
    write_manifest(tmp_path, spec)
    for arm, values in {"a": {}, "b": {"groups_external": 4, "groups_hostile": 1, "absurd": 3, "refused": {"copied": 2}}}.items():
        folder = run_folder(tmp_path, arm, 1)
        writer = RecordWriter(folder.records)
        for number in (1, 2):
            writer.write("step", round=number, node="n00", trained_reward=0.1, local_reward=0.1, generated=8, **values)
        writer.close()
        folder.finish(2, 1.0, spec.digest(arm))
    numbers = measures(read_records(run_folder(tmp_path, "b", 1).records)).numbers
    assert (numbers["hostile_share"], numbers["hostile_refused"], numbers["absurd_answers"]) == (0.25, 2.0, 3.0)
    write_report(tmp_path, tmp_path / "report")
    table = (tmp_path / "report" / "report.md").read_text().split("## Hostile text that got through\n\n")[1]
    assert "| a | 1 | – | – | – |" in table
    assert "| b | 1 | 0.2500 | 2.00 | 3.00 |" in table


@pytest.mark.slow
def test_a_report_compares_arms_by_seed_and_at_equal_completions(tmp_path: Path) -> None:
    write_manifest(tmp_path, parse_spec(spec_source()))
    for arm, levels, generated in (("8-0", (0.1, 0.2), 16), ("4-4", (0.15, 0.3), 8)):
        for seed, level in zip((1, 2), levels, strict=True):
            folder = run_folder(tmp_path, arm, seed)
            write_run(folder.records, level, generated)
            folder.finish(40, 20.0, "x")
    written = write_report(tmp_path, tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert list(report["arms"]) == ["8-0", "4-4"]
    arm = report["arms"]["4-4"]
    assert arm["baseline"] == "8-0"
    assert arm["ratios"]["trained_total"]["mean"] == pytest.approx(1.5)
    # 8/0 has made as many completions after half its rounds, when its gain was half as large.
    assert arm["estimates"]["gain_matched"]["mean"] == pytest.approx(arm["estimates"]["gain"]["mean"], abs=1e-3)
    assert report["arms"]["8-0"]["estimates"]["gain_matched"]["mean"] == pytest.approx(0.0375, abs=1e-3)
    assert all(file.stat().st_size > 1000 for file in written.files)
    assert "| 4-4 | 2 |" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.slow
def test_arms_are_compared_with_their_own_baseline(tmp_path: Path) -> None:
    arms = {"low-8-0": {}, "high-8-0": {}, "high-4-4": {"baseline": "high-8-0"}}
    write_manifest(tmp_path, parse_spec(spec_source(arms=arms)))
    for arm, level, generated in (("low-8-0", 0.1, 2), ("high-8-0", 0.2, 16), ("high-4-4", 0.5, 8)):
        folder = run_folder(tmp_path, arm, 1)
        write_run(folder.records, level, generated, nodes=3)
        folder.finish(40, 20.0, "x")
    write_report(tmp_path, tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert {name: arm["baseline"] for name, arm in report["arms"].items()} == {
        "low-8-0": "low-8-0",
        "high-8-0": "low-8-0",
        "high-4-4": "high-8-0",
    }
    assert report["arms"]["high-4-4"]["ratios"]["gain"]["mean"] == pytest.approx(2.5)
    # Each at the completions of the thriftiest of those that it is compared with.
    assert report["matched_completions"] == {"low-8-0": 3 * 40 * 2, "high-8-0": 3 * 40 * 8}
    assert "## Ratio to high-8-0" in (tmp_path / "report" / "report.md").read_text()
    with pytest.raises(SpecError, match=r"arms\.x\.baseline: no arm is called 'y'"):
        parse_spec(spec_source(arms={"x": {"baseline": "y"}}))


def test_a_run_of_an_arm_that_has_changed_since_is_not_taken_for_it(tmp_path: Path) -> None:
    spec = parse_spec(spec_source())
    done = run_folder(tmp_path, "4-4", 1)
    write_run(done.records, 0.1, 8)
    done.finish(40, 1.0, spec.digest("4-4"))
    changed = parse_spec(spec_source(arms={"8-0": {}, "4-4": {"rounds": 9}}))
    with pytest.raises(SpecError, match="another version of arm 4-4 in the spec"):
        runs_to_make(changed, tmp_path)
    assert len(runs_to_make(parse_spec(spec_source(seeds=[1], arms={"4-4": {"baseline": "8-0"}, "8-0": {}})), tmp_path)) == 1


def test_finished_runs_are_skipped_and_others_made_seed_by_seed(tmp_path: Path) -> None:
    spec = parse_spec(spec_source())
    done = run_folder(tmp_path, "4-4", 1)
    write_run(done.records, 0.1, 8)
    assert finished_runs(tmp_path) == []
    done.finish(40, 1.0, spec.digest("4-4"))
    assert [(run.arm, run.seed) for run in runs_to_make(spec, tmp_path)] == [("8-0", 1), ("8-0", 2), ("4-4", 2)]
    assert [(run.arm, run.seed) for run in runs_to_make(spec, tmp_path, ["4-4"], [1, 7])] == [("4-4", 7)]
    with pytest.raises(SpecError, match="no arm is called 9-9"):
        runs_to_make(spec, tmp_path, ["9-9"])


def test_results_of_one_spec_take_no_runs_of_another(tmp_path: Path) -> None:
    write_manifest(tmp_path, parse_spec(spec_source()))
    write_manifest(tmp_path, parse_spec(spec_source(seeds=[1, 2, 3])))
    with pytest.raises(SpecError, match="another spec"):
        write_manifest(tmp_path, parse_spec(spec_source(rounds=4)))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"simulate"', '"services"'))
    with pytest.raises(SpecError, match="another spec"):
        write_manifest(tmp_path, parse_spec(spec_source()))


def test_a_torn_record_file_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "r.gz", 0.1, 8)
    (tmp_path / "torn.gz").write_bytes((tmp_path / "r.gz").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"torn\.gz cannot be read"):
        list(read_records(tmp_path / "torn.gz"))


def test_floats_are_kept_to_six_decimals_and_what_is_no_number_is_null() -> None:
    assert rounded({"a": [0.12345678, math.inf, 1.0], "b": math.nan}) == {"a": [0.123457, None, 1], "b": None}


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
