"""What makes a figure believable: floors, intervals over seeds and questions, corrections, the
commit that made a run.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lab.floors import Floor, out_datasets, read_floors, write_floors
from lab.measures import measures
from lab.records import RecordWriter, read_records
from lab.report import write_report
from lab.runs import run_folder, write_manifest
from lab.spec import SpecError, parse_spec
from lab.statistics import holm, sign_flip_p
from shared.config import TaskSpec
from shared.tasks import held_out_tasks

pytestmark = pytest.mark.usefixtures("without_plots")


def test_the_p_of_signs_counts_the_flips_that_are_as_extreme() -> None:
    differences = [0.3, 0.1, 0.2, -0.05]
    flips = [math.fsum(s * d for s, d in zip(signs, differences, strict=True)) for signs in itertools.product((1, -1), repeat=4)]
    assert sign_flip_p(differences) == sum(abs(total) >= 0.55 - 1e-12 for total in flips) / 16
    assert sign_flip_p([0.2] * 10) == 2 / 2**10
    assert sign_flip_p([0.0, 0.0]) == 1.0
    # Their sum is 0 but for rounding: each flip is as extreme.
    assert sign_flip_p([-0.012, 0.009, 0.0, 0.003]) == 1.0
    with pytest.raises(ValueError, match="not all finite"):
        sign_flip_p([0.1, math.nan])
    # Too many to count all flips: drawn, and never 0.
    assert 0.0 < sign_flip_p([0.2] * 20) < 1e-4


def test_p_values_are_corrected_after_holm() -> None:
    # Sorted: 0.01 x 4, 0.02 x 3 = 0.06, 0.03 x 2 = 0.06, 0.5; and never less than the one before.
    assert holm({"a": 0.02, "b": 0.5, "c": 0.01, "d": 0.03}) == pytest.approx({"c": 0.04, "a": 0.06, "d": 0.06, "b": 0.5})
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert holm({}) == {}
    # One that was stated and has no data yet could still be the largest.
    assert holm({"a": 0.02, "b": 0.5}, asked=3) == pytest.approx({"a": 0.06, "b": 1.0})


FLOORS = [
    Floor(dataset="gcd", config="{}", questions=50, constant="1", constant_rate=0.4, copy="a number 1", copy_rate=0.1),
    Floor(dataset="chain_sum", config="{}", questions=50, constant="`|\n", constant_rate=0.02, copy="a line 1", copy_rate=0.3),
]


def write_run(file: Path, passes: dict[int, str], generated: int = 8) -> None:
    """One node, two questions of chain_sum and three of gcd; `passes` by round."""
    writer = RecordWriter(file)
    for number, passed in passes.items():
        bits = [int(digit) for digit in passed]
        parts = {"chain_sum": bits[:2], "gcd": bits[2:]}
        tasks = {name: [len(part), sum(part) / len(part), 0.0] for name, part in parts.items()}
        writer.write("step", round=number, node="n00", trained_reward=0.1, local_reward=0.1, generated=generated)
        writer.write("eval", round=number, node="n00", n=5, pass_rate=sum(bits) / 5, mean_reward=0.0, tasks=tasks, passed=passed)
    writer.close()


def source(**changes: Any) -> dict[str, Any]:
    head = {"name": "x", "seeds": [1, 2], "rounds": 3, "nodes": 1, "tasks": [{"dataset": "gcd"}, {"dataset": "chain_sum"}]}
    return {**head, "arms": {"a": {}, "b": {}, "c": {}}, **changes}


def test_a_gain_is_given_without_the_datasets_that_a_constant_passes(tmp_path: Path) -> None:
    write_run(tmp_path / "r.gz", {0: "00000", 1: "10111", 2: "11111"})
    found = measures(read_records(tmp_path / "r.gz"), out_datasets(FLOORS))
    assert found.numbers["gain_screened"] == pytest.approx((0.25 + 0.75) / 2)
    everything = measures(read_records(tmp_path / "r.gz"))
    assert everything.numbers["gain_screened"] == pytest.approx(everything.numbers["gain"]) == pytest.approx(0.65)


@pytest.mark.slow
def test_a_report_prints_floors_stated_comparisons_and_commits(tmp_path: Path) -> None:
    spec = parse_spec(source(confirm=["b"]))
    write_manifest(tmp_path, spec)
    runs = {"a": ("00000", "10000"), "b": ("00000", "11000"), "c": ("00000", "10111")}
    for arm, (first, last) in runs.items():
        for seed in (1, 2):
            folder = run_folder(tmp_path, arm, seed)
            write_run(folder.records, {0: first, 1: last, 2: last})
            folder.finish(3, 1.0, spec.digest(arm))
    write_floors(tmp_path, FLOORS)
    write_report(tmp_path, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| gcd | `1` | 0.400 | `a number 1` | 0.100 | **out** |" in text
    assert "| chain_sum | `'\\|\\n` | 0.020 | `a line 1` | 0.300 |  |" in text
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    stated, exploratory = report["comparisons"]
    assert (stated["arm"], stated["stated"], stated["p"], stated["p_corrected"]) == ("b", True, 0.5, 0.5)
    assert stated["ratio"] == {"ratio": 2.0, "low": pytest.approx(2.0), "high": pytest.approx(2.0)}, "both seeds are alike"
    # What gcd alone shows is no gain; and nobody asked beforehand.
    assert (exploratory["arm"], exploratory["ratio"]["ratio"], exploratory["p"]) == ("c", 1.0, None)
    (commit,) = report["commits"]
    assert report["commits"] == {commit: 6}
    assert f"6 by `{commit}`" in text
    (tmp_path / "floors.json").unlink()
    write_report(tmp_path, tmp_path / "report")
    assert "were not screened" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compare", "ratio"),
    [
        # Over its two rounds b passes 0, 0.5, 1, and a 0, 1, 1.
        ("whole runs", 0.5 / 0.75),
        # b has the 24 completions of a's three steps after one and a half of its own, in round 0.5,
        # up to which it gained 0.125.
        ("equal completions", 0.125 / 0.75),
    ],
)
def test_arms_are_compared_over_whole_runs_or_up_to_where_the_shorter_one_ended(compare: str, ratio: float, tmp_path: Path) -> None:
    spec = parse_spec(source(confirm=["b"], compare=compare))
    write_manifest(tmp_path, spec)
    for arm, generated, passes in (("a", 8, ("00", "11", "11")), ("b", 16, ("00", "10", "11"))):
        for seed in (1, 2, 3, 4):
            folder = run_folder(tmp_path, arm, seed)
            write_run(folder.records, {place: bits + "000" for place, bits in enumerate(passes)}, generated)
            folder.finish(3, 1.0, spec.digest(arm))
    write_floors(tmp_path, FLOORS)
    write_report(tmp_path, tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    (found,) = report["comparisons"]
    assert found["ratio"]["ratio"] == pytest.approx(ratio, abs=1e-6)
    assert f"screened, over {compare}. " in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.slow
def test_stated_comparisons_that_were_not_run_count_in_the_correction_and_one_stated_twice_once(tmp_path: Path) -> None:
    spec = parse_spec(source(confirm=["b", "b/a", "c"]))
    write_manifest(tmp_path, spec)
    for arm, last in {"a": "10000", "b": "11000"}.items():
        for seed in range(1, 7):
            folder = run_folder(tmp_path, arm, seed)
            write_run(folder.records, {0: "00000", 1: last, 2: last})
            folder.finish(3, 1.0, spec.digest(arm))
    write_report(tmp_path, tmp_path / "report")
    (found,) = json.loads((tmp_path / "report" / "report.json").read_text())["comparisons"]
    assert (found["p"], found["p_corrected"]) == (2 / 2**6, 2 * 2 / 2**6)


@pytest.mark.slow
def test_an_arm_that_made_nothing_has_no_part_to_be_compared_at_equal_completions(tmp_path: Path) -> None:
    spec = parse_spec(source(compare="equal completions"))
    write_manifest(tmp_path, spec)
    for arm, generated, last in (("a", 8, 0.4), ("b", 16, 0.4), ("c", 0, 0.1)):
        for seed in (1, 2):
            folder = run_folder(tmp_path, arm, seed)
            writer = RecordWriter(folder.records)
            for number, rate in enumerate((0.0, last / 2, last)):
                tasks = {"gcd": [10, rate, rate]}
                writer.write("step", round=number, node="n", trained_reward=0.1, local_reward=0.1, generated=generated)
                writer.write("eval", round=number, node="n", n=10, pass_rate=rate, mean_reward=rate, tasks=tasks)
            writer.close()
            folder.finish(3, 1.0, spec.digest(arm))
    write_report(tmp_path, tmp_path / "report")
    (found,) = json.loads((tmp_path / "report" / "report.json").read_text())["comparisons"]
    # b has the 24 completions of a's run in round 0.5: a mean of 0.05 against 0.2.
    assert (found["arm"], found["ratio"]["ratio"]) == ("b", pytest.approx(0.25))


def test_nodes_that_are_evaluated_at_other_rounds_move_no_mean(tmp_path: Path) -> None:
    """Real generators skip versions. Two nodes that learn nothing, one better than the other, have
    no gain between them.
    """
    writer = RecordWriter(tmp_path / "r.gz")
    for node, level, rounds in (("a", 0.1, (0, 4, 8, 12)), ("b", 0.5, (0, 5, 7, 11))):
        for number in rounds:
            tasks = {"gcd": [10, level, level]}
            writer.write("step", round=number, node=node, trained_reward=0.1, local_reward=0.1, generated=8)
            writer.write("eval", round=number, node=node, n=10, pass_rate=level, mean_reward=level, tasks=tasks)
    writer.close()
    found = measures(read_records(tmp_path / "r.gz"))
    assert [y for _, y in found.held_out] == pytest.approx([0.3] * 7)
    assert [y for _, y in found.held_out_of_task["gcd"]] == pytest.approx([0.3] * 7)
    for name in ("gain", "gain_screened", "final_gain"):
        assert found.numbers.get(name, 0.0) == pytest.approx(0.0, abs=1e-12), name


@pytest.mark.slow
def test_a_stated_comparison_may_be_of_any_two_arms(tmp_path: Path) -> None:
    spec = parse_spec(source(confirm=["c/b", "b"]))
    write_manifest(tmp_path, spec)
    for arm, last in {"a": "10000", "b": "11000", "c": "11100"}.items():
        for seed in (1, 2):
            folder = run_folder(tmp_path, arm, seed)
            write_run(folder.records, {0: "00000", 1: last, 2: last})
            folder.finish(3, 1.0, spec.digest(arm))
    write_report(tmp_path, tmp_path / "report")
    found = json.loads((tmp_path / "report" / "report.json").read_text())["comparisons"]
    assert [(each["arm"], each["baseline"], each["stated"]) for each in found] == [
        ("c", "b", True),
        ("b", "a", True),
        ("c", "a", False),
    ]
    assert [each["ratio"]["ratio"] for each in found] == pytest.approx([1.5, 2.0, 3.0], abs=1e-5)
    assert [each["p_corrected"] for each in found] == [1.0, 1.0, None]


def test_a_torn_list_of_floors_is_named(tmp_path: Path) -> None:
    assert read_floors(tmp_path) is None
    (tmp_path / "floors.json").write_text('[{"dataset": 1}]')
    with pytest.raises(SpecError, match="floors.json"):
        read_floors(tmp_path)


def test_a_spec_may_only_confirm_an_arm_that_it_has() -> None:
    with pytest.raises(SpecError, match="confirm: no arm is called 'd'"):
        parse_spec(source(confirm=["d"]))
    with pytest.raises(SpecError, match="confirm: no arm is called 'e'"):
        parse_spec(source(confirm=["a/e"]))


def test_held_out_sets_of_other_draws_are_other_questions() -> None:
    sources = [TaskSpec(dataset="chain_sum")]
    sets = [{task.text for task in held_out_tasks(sources, 100, draw=draw)} for draw in (0, 1, 300)]
    assert sets[0] == {task.text for task in held_out_tasks(sources, 100)}
    assert all(len(each) == 100 for each in sets)
    assert len(sets[0] & sets[1]) + len(sets[0] & sets[2]) + len(sets[1] & sets[2]) < 5
