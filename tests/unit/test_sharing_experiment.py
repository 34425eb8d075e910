"""`swarm experiment sharing`: its intervals, its sentence, its figures from the nodes' records."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.config import NodeConfig
from shared.intervals import estimate, seeds_needed, t_quantile
from swarm_cli.errors import CommandError
from swarm_cli.sharing_experiment import (
    REPLAY,
    SHARING,
    Cost,
    Plan,
    Result,
    _plan,
    check_alike,
    differences,
    read_result,
    sentence,
)

STRIPS = 4000


def _beyond(t: float, degrees: int) -> float:
    """Two-sided probability beyond t of Student's distribution: its density, integrated by
    Simpson's rule after x = sqrt(n) tan(u).
    """
    norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)

    def density(u: float) -> float:
        return norm * math.cos(u) ** (degrees - 1)

    end, width = math.atan(t / math.sqrt(degrees)), math.atan(t / math.sqrt(degrees)) / STRIPS
    inner = sum((4 if place % 2 else 2) * density(place * width) for place in range(1, STRIPS))
    return 1 - 2 * (density(0.0) + density(end) + inner) * width / 3


@pytest.mark.parametrize("degrees", [1, 2, 3, 9, 30, 31, 60, 400])
def test_the_quantile_leaves_a_twentieth_of_students_distribution_outside(degrees: int) -> None:
    assert _beyond(t_quantile(degrees), degrees) == pytest.approx(0.05, abs=2e-4)


@pytest.mark.parametrize("values", [[0.05, -0.02, 0.11, 0.03], [0.02, 0.01], [-0.2, 0.1, 0.05, -0.3, 0.0]])
def test_the_seeds_that_would_show_a_mean_are_the_fewest_whose_interval_leaves_out_0(values: list[float]) -> None:
    mean, deviation = statistics.fmean(values), statistics.stdev(values)

    def p(seeds: int) -> float:
        return _beyond(abs(mean) * math.sqrt(seeds) / deviation, seeds - 1)

    found = seeds_needed(values, 1000)
    assert found is not None
    assert p(found) < 0.05
    assert found == 2 or p(found - 1) >= 0.05
    interval = estimate(values)
    assert interval.mean == pytest.approx(mean)
    assert interval.half_width == pytest.approx(t_quantile(len(values) - 1) * deviation / math.sqrt(len(values)))


def test_a_mean_of_0_is_shown_by_no_number_of_seeds() -> None:
    assert seeds_needed([0.1, -0.1], 1000) is None
    assert seeds_needed([0.0, 0.0], 1000) is None


def _pairs(*gains: float, further: float = 5.0) -> dict[int, dict[str, Result]]:
    def result(end: float) -> Result:
        curves = (((0.0, 0.2), (100.0, end)), ((0.0, 0.2), (100.0, end)))
        return Result(curves=curves, figures={"further groups": further}, asked=frozenset())

    return {seed: {SHARING: result(0.3 + gain), REPLAY: result(0.3)} for seed, gain in enumerate(gains, start=1)}


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((0.05, -0.02, 0.11, 0.03), ["+0.04 ", "95 %: -0.04 to +0.13", "not shown with 4 seeds", "about 9 "]),
        ((0.10, 0.11, 0.12), ["+0.11 ", "95 %: +0.09 to +0.13", " shown with 3 seeds"]),
        ((-0.10, -0.11, -0.12), ["-0.11 ", "95 %: -0.13 to -0.09", "worse, shown with 3 seeds"]),
        ((0.0, 0.0), ["+0.00 ", "not shown with 2 seeds", "more than 1,000"]),
        ((0.07,), ["+0.07 ", "1 seed", "no interval"]),
    ],
)
def test_the_sentence_has_the_gain_its_interval_and_the_number_of_seeds(gains: tuple[float, ...], words: list[str]) -> None:
    said = sentence(_pairs(*gains))
    assert [word for word in words if word not in said] == [], said
    assert ("not shown" in said) == ("not shown" in " ".join(words))


def test_where_no_group_of_another_node_was_trained_on_the_sentence_gives_no_gain() -> None:
    alone, together = _pairs(0.05, 0.11, further=0.0), _pairs(0.05, 0.11)
    assert "not measured" in sentence(alone) and "+0." not in sentence(alone)
    assert "in 1 of them no group" in sentence({1: alone[1], 2: together[2]})
    assert "no group" not in sentence(together)


def test_arms_are_compared_after_as_many_completions() -> None:
    longer = Result(curves=(((0.0, 0.2), (100.0, 0.4), (200.0, 0.8)),), figures={}, asked=frozenset())
    assert differences({1: {**_pairs(0.0)[1], SHARING: longer}}) == [pytest.approx(0.1)]


def test_seeds_that_were_scored_by_another_reward_are_not_put_together() -> None:
    def seed(number: int, scorer: str) -> dict[str, Result]:
        asked = frozenset({(f"questions of seed {number}", scorer, 8)})
        return {arm: Result(curves=(((0.0, 0.2), (100.0, 0.4)),), figures={}, asked=asked) for arm in (SHARING, REPLAY)}

    check_alike({1: seed(1, "a"), 2: seed(2, "a")})
    with pytest.raises(CommandError, match="2 different rewards"):
        check_alike({1: seed(1, "a"), 2: seed(2, "b")})


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    def make(**changed: Any) -> Plan:
        config = NodeConfig(node={"id": "alpha"}, tasks=[{"dataset": "gcd"}], **changed)
        return Plan(config=config, file=Path("node.toml"), out=tmp_path, nodes=2, steps=2, local=3, external=6)

    return make


def test_a_result_is_the_mean_of_its_nodes_by_completions_of_their_own(plan: Callable[..., Plan]) -> None:
    made = plan(generator={"completions": 4})
    for node, rates in {"alpha": [0.1, 0.3], "beta": [0.2, 0.6]}.items():
        folder = made.out / SHARING / "seed-1" / node
        folder.mkdir(parents=True)
        fixed = {"groups_local": 3, "tokens": 50, "phase_seconds": {"wait": 1.5}}
        steps = [{"step": step, "groups_external": step, "updated": step == 2, **fixed} for step in (1, 2)]
        scores = [
            {"policy_version": version, "n": 10, "pass_rate": rate, "mean_reward": rate, "held_out": "a" * 64, "scorer": "b" * 64}
            for version, rate in zip((0, 2), rates, strict=True)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
        (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    result = read_result(made, SHARING, 1)
    assert list(result.figures.values()) == [6, 3, 100, 1, 3.0]
    assert result.mean == [(0.0, pytest.approx(0.15)), (24.0, pytest.approx(0.45))]
    assert result.at(12) == pytest.approx(0.3)
    with pytest.raises(CommandError, match="no step is on record"):
        read_result(made, REPLAY, 1)


def test_both_arms_make_the_same_completions_and_only_the_rest_of_a_batch_differs(plan: Callable[..., Plan]) -> None:
    arms = [plan().environment(arm, 7, 40) for arm in (SHARING, REPLAY)]
    assert arms[0]["SWARM_EVAL__DRAW"] == arms[0]["SWARM_NODE__SEED"] == "7"
    assert {name: (arms[0][name], arms[1][name]) for name in arms[0] if arms[0][name] != arms[1][name]} == {
        "SWARM_SAMPLER__EXTERNAL": ("6", "0"),
        "SWARM_SAMPLER__REPLAY": ("0", "6"),
    }


def test_a_run_costs_what_the_trial_did_and_its_further_steps_and_evaluations() -> None:
    assert Cost(30.0, 2.0, 5.0).run(60) == 30 + 57 * 2 + (4 - 3) * 5


@pytest.mark.parametrize(
    ("settings", "field"),
    [("[eval]\ntasks = 0\n", "eval.tasks"), ("[sampler]\nlocal = 1\nexternal = 11\n", "sampler.external")],
)
def test_a_configuration_of_which_nothing_can_be_compared_is_refused_before_anything_starts(
    settings: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "node.toml"
    file.write_text(f'{settings}[[tasks]]\ndataset = "gcd"\n')
    with pytest.raises(CommandError, match=field) as refused:
        _plan(file, 2, None, None)
    assert refused.value.exit_code == 78


def test_a_node_that_shares_nothing_is_tried_with_the_usual_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "node.toml"
    file.write_text('[sampler]\nlocal = 8\nexternal = 0\n[trainer]\nmax_steps = 9\n[[tasks]]\ndataset = "gcd"\n')
    made = _plan(file, 3, None, None)
    assert (made.local, made.external, made.steps, made.completions) == (2, 6, 9, 9 * 2 * made.config.generator.completions)
