"""`swarm plot` over a run's files."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shared.tasks.evaluation import rate_interval
from swarm_cli.errors import CommandError
from swarm_cli.observe.plot import draw_curves, find_run, plot, trailing_mean
from swarm_cli.observe.run_files import newest_step, read_evaluations, read_steps

REPO = Path(__file__).parents[2]


def write_run(run_dir: Path, *, nodes: int = 2, steps: int = 150) -> Path:
    """Files as a run of the demo leaves them: noisy rewards that rise, evaluations every 25
    versions.
    """
    for position in range(nodes):
        random.seed(position)
        folder = run_dir / ("alpha", "beta", "gamma")[position]
        folder.mkdir(parents=True)
        with (folder / "metrics.jsonl").open("w") as metrics:
            for step in range(1, steps + 1):
                skill = 0.1 + 0.5 * (1 - math.exp(-step / (60 + 20 * position)))
                line = {
                    "step": step,
                    "policy_version": step,
                    "loss": random.gauss(0, 0.02),
                    "grad_norm": math.exp(random.gauss(-1, 0.5)),
                    "entropy": 1.2 * math.exp(-step / 90) + random.gauss(0, 0.02),
                    "reward_local": min(1, max(0, random.gauss(skill, 0.08))),
                    "reward_external": None if step < 3 else min(1, max(0, random.gauss(skill, 0.1))),
                    "groups_local": 4 if step > 5 else 8,
                    "groups_external": 4 if step > 5 else 0,
                    "staleness_mean": random.choice([0.5, 1.0, 1.25, 1.75]),
                    "staleness_max": 2,
                }
                metrics.write(json.dumps(line) + "\n")
        with (folder / "eval.jsonl").open("w") as evaluations:
            for version in range(0, steps + 1, 25):
                pass_rate = 0.08 + 0.42 * (1 - math.exp(-version / (60 + 20 * position)))
                evaluations.write(json.dumps({"policy_version": version, "pass_rate": pass_rate, "n": 200}) + "\n")
    return run_dir


@pytest.mark.slow
def test_a_png_of_readable_size_is_written_into_the_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "var" / "runs" / "demo")
    plot("demo", out=None, var_dir=tmp_path / "var")
    picture = (run_dir / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert width >= 1000 and height >= 1000


@pytest.mark.slow
def test_a_run_without_evaluations_or_after_its_first_step_can_be_drawn(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", nodes=1, steps=1)
    (run_dir / "alpha" / "eval.jsonl").unlink()
    draw_curves("run", [run_dir / "alpha"], tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.slow
def test_ticks_are_whole_steps_and_equal_curves_do_not_hide_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path / "run", nodes=3, steps=3)
    for name in ("beta", "gamma"):
        for file in ("metrics.jsonl", "eval.jsonl"):
            (run_dir / name / file).write_text((run_dir / "alpha" / file).read_text())
    figures: list[Figure] = []
    monkeypatch.setattr(plt, "close", figures.append)
    draw_curves("run", [run_dir / name for name in ("alpha", "beta", "gamma")], tmp_path / "out.png")
    (figure,) = figures
    for axis in figure.axes:
        ticks = [float(tick) for tick in axis.get_xticks()]
        assert ticks == [round(tick) for tick in ticks], axis.get_title()
        widths = [line.get_linewidth() for line in axis.lines if line.get_label() in ("alpha", "beta", "gamma")]
        assert len(set(widths)) == len(widths) and widths == sorted(widths, reverse=True), axis.get_title()


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "monday", steps=1)
    with pytest.raises(CommandError, match="newest are monday"):
        find_run("tuesday", tmp_path)


def test_torn_and_repeated_lines_do_not_count_twice(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5}\n{"step": 2}\n{"step": 1, "loss": 6}\n{"step": 3, "lo')
    assert [(line["step"], line.get("loss")) for line in read_steps(tmp_path)] == [(1, 6), (2, None)]
    assert newest_step(tmp_path) == {"step": 1, "loss": 6}
    (tmp_path / "eval.jsonl").write_text('{"policy_version": 0, "pass_rate": 0.1, "n": 200}\n{"policy_version": "x"}\n')
    assert [evaluation.pass_rate for evaluation in read_evaluations(tmp_path)] == [0.1]


def test_the_trailing_mean_and_the_95_percent_interval_are_those_worked_out_by_hand() -> None:
    assert trailing_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert rate_interval(0.83, 200) == (pytest.approx(0.772, abs=5e-4), pytest.approx(0.876, abs=5e-4)), "as on the page"
    assert rate_interval(0.0, 16)[0] == 0.0


@pytest.mark.slow
def test_a_set_on_which_no_answer_is_right_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = _curves(tmp_path / "a", monkeypatch, [0.1, 0.1], [0.0, 0.0], error=0.0)
    of_set = next(axis for title, axis in axes.items() if title.startswith("Evaluation set late"))
    ends = [point[1] for bars in of_set.collections for segment in bars.get_segments() for point in segment]
    assert max(ends) == pytest.approx(0.324, abs=1e-3), "Wilson's end for none of eight questions"


def _curves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rewards: list[float], sets: list[float], error: float = 0.1
) -> dict[str, Axes]:
    """The axes of a run's plot, by title."""
    node = folder / "alpha"
    node.mkdir(parents=True)
    steps = [{"step": step, "reward_local": reward, "entropy": 0.5, "groups_local": 4} for step, reward in enumerate(rewards, 1)]
    (node / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    of_set = {"set": "late", "k": 2, "questions": 8, "n": 16, "held_out": "a" * 64, "scorer": "b" * 64, "pass_rule": "c" * 64}
    results = [
        {**of_set, "policy_version": version, "pass_rate": rate, "mean_reward": rate, "error": error, "pass_at": {"2": rate + 0.1}}
        for version, rate in enumerate(sets)
    ]
    (node / "eval_sets.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
    drawn: list[Figure] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    draw_curves("a", [node], folder / "a.png")
    return {axis.get_title(): axis for axis in drawn[0].axes if axis.get_title()}


_NOISE = [0.30 + 0.01 * (step % 3) for step in range(60)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewards", "sets"),
    [([0.30, 0.31], [0.20, 0.21]), (_NOISE, [0.2, 0.22, 0.19]), ([0.1, 0.5, 0.9], [0.1, 0.8])],
    ids=["two points", "noise", "a rise"],
)
def test_scores_are_drawn_from_0_to_1_whatever_they_do_and_panels_without_data_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: list[float], sets: list[float]
) -> None:
    axes = _curves(tmp_path / "a", monkeypatch, rewards, sets)
    of_reward = next(axis for title, axis in axes.items() if title.startswith("Reward of local"))
    of_set = next(axis for title, axis in axes.items() if title.startswith("Evaluation set late: avg@2, pass@2"))
    assert of_reward.get_ylim() == of_set.get_ylim() == (0, 1)
    assert not [title for title in axes if title.startswith(("Loss", "Gradient", "Reward of foreign"))], list(axes)


@pytest.mark.slow
def test_rewards_beyond_1_are_drawn_from_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = _curves(tmp_path / "a", monkeypatch, [10.0, 10.1, 10.05], [0.5])
    low, high = next(axis for title, axis in axes.items() if title.startswith("Reward of local")).get_ylim()
    assert low == 0 and high > 10
