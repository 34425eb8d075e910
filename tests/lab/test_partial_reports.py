"""Reports of a part of the results, of few seeds, and of arms that came out alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.floors import Floor, out_lines
from lab.records import RecordWriter
from lab.report import Part, write_report
from lab.runs import run_folder, write_manifest
from lab.spec import SpecError, parse_spec
from swarm_cli.experiment_commands import report as report_command

pytestmark = pytest.mark.usefixtures("without_plots")


def write_run(file: Path, passed: str, seconds: float = 1.0) -> None:
    """One node, two questions of chain_sum and three of gcd, none passed at first and `passed` at
    the end.
    """
    writer = RecordWriter(file)
    for number, each in enumerate(("00000", passed)):
        bits = [int(digit) for digit in each]
        parts = {"chain_sum": bits[:2], "gcd": bits[2:]}
        tasks = {name: [len(part), sum(part) / len(part), 0.0] for name, part in parts.items()}
        writer.write("step", round=number, node="n00", trained_reward=0.1, local_reward=0.1, generated=8)
        writer.write("eval", round=number, node="n00", n=5, pass_rate=sum(bits) / 5, mean_reward=0.0, tasks=tasks, passed=each)
        writer.write("round", round=number, seconds={"train": seconds})
    writer.close()


def results_of(folder: Path, passed: Mapping[str, str], seeds: int) -> Path:
    """Complete runs of arms, with what each passes at the end."""
    source: dict[str, Any] = {"name": "x", "seeds": [1], "rounds": 1, "nodes": 1, "tasks": [{"dataset": "gcd"}]}
    spec = parse_spec({**source, "arms": {arm: {} for arm in passed}})
    write_manifest(folder, spec)
    for place, (arm, bits) in enumerate(passed.items()):
        for seed in range(1, seeds + 1):
            run = run_folder(folder, arm, seed)
            write_run(run.records, bits, seconds=1.0 + place)
            run.finish(1, 1.0, spec.digest(arm))
    return folder


def read_report(folder: Path) -> tuple[str, dict[str, Any]]:
    return (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text())


def test_each_ratio_has_fiellers_interval_and_one_that_cannot_be_bounded_says_so(tmp_path: Path) -> None:
    write_report(results_of(tmp_path / "3", {"a": "11110", "b": "11111"}, 3), tmp_path / "of 3")
    text, found = read_report(tmp_path / "of 3")
    assert "| b | a | exploratory | 3 | 1.25 (1.25 to 1.25) |" in text
    assert found["comparisons"][0]["ratio"] == {"ratio": 1.25, "low": 1.25, "high": 1.25}
    write_report(results_of(tmp_path / "0", {"a": "00000", "b": "11111"}, 3), tmp_path / "of 0")
    text, found = read_report(tmp_path / "of 0")
    assert found["comparisons"][0]["ratio"] is None
    assert "| b | a | exploratory | 3 | no ratio can be bounded |" in text


def test_a_report_of_a_part_says_so_and_leaves_the_whole_one_alone(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"a": "10111", "b": "11000"}, 4)
    written = write_report(results, results / "report")
    assert "| b | a | exploratory | 4 | 0.50 " in written.findings
    text, found = read_report(results / "report")
    assert "Part of the results" not in text and "part" not in found
    assert found["comparisons"][0]["gains"] == {
        "arm": dict.fromkeys("1234", pytest.approx(0.2)),
        "baseline": dict.fromkeys("1234", pytest.approx(0.4)),
    }
    part = Part(without=["gcd"], seeds=[2, 3])
    with pytest.raises(SpecError, match="give another --out for a part"):
        write_report(results, results / "report", part)
    written = write_report(results, results / "other", part)
    text, found = read_report(results / "other")
    assert "**Part of the results**: gcd treated as out; only seeds 2, 3." in text
    assert "Part of the results" in written.findings
    assert found["part"] == {"without": ["gcd"], "seeds": [2, 3]}
    # Of chain_sum alone b passes twice as many.
    assert (found["comparisons"][0]["ratio"]["ratio"], found["comparisons"][0]["seeds"]) == (2.0, 2)
    assert sum(found["commits"].values()) == 4
    assert found["arms"]["b"]["estimates"]["gain_screened"]["mean"] == pytest.approx(0.5)
    with pytest.raises(SpecError, match="no run of seed 7 is complete; seeds with complete runs: 1, 2, 3, 4"):
        write_report(results, tmp_path / "none", Part(seeds=[7]))
    with pytest.raises(SpecError, match="no run was evaluated on 'lcm', only on chain_sum, gcd"):
        write_report(results, tmp_path / "none", Part(without=["lcm"]))


def test_the_command_writes_a_part_beside_the_report_and_prints_the_comparisons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of(tmp_path, {"a": "10111", "b": "11000"}, 2)
    report_command(results, None, ["gcd"], "1,2")
    said = capsys.readouterr().out
    assert "| b | a | exploratory | 2 | 2.00 (2.00 to 2.00) |" in said
    assert str(results / "report-part" / "report.md") in said
    assert not (results / "report").exists()


def test_datasets_that_are_out_are_said_in_a_sentence_each() -> None:
    rest = {"config": "{}", "questions": 50, "copy": "a line 1", "copy_rate": 0.1}
    logic = Floor(dataset="propositional_logic", constant="(Q ∨ P)", constant_rate=0.55, **rest)
    total = Floor(dataset="chain_sum", constant="1", constant_rate=0.02, **rest)
    assert out_lines([total, logic]) == [
        "propositional_logic is out: the constant `(Q ∨ P)` has a pass rate of 0.55; see the columns named screened"
    ]
    assert out_lines([total]) == ["no dataset is out"]
