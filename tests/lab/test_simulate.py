"""A simulated swarm's runs: the same records for a seed, and each node under the rules that its
settings give a real one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.arms import plan_run
from lab.records import RecordWriter, read_records
from lab.simulate import Simulation
from lab.spec import SpecError
from lab.task_desk import Shared
from shared.config.sampler_section import SamplerSection
from tests.lab.tiny_swarm import tiny_qwen3, tiny_spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def shared() -> Shared:
    """Derived tasks and scores, which no run changes."""
    return Shared()


def simulate(folder: Path, file: Path, shared: Shared | None = None, seed: int = 1, **spec: Any) -> Simulation:
    torch.set_num_threads(1)
    simulation = Simulation(plan_run(tiny_spec(folder, **spec), "base", seed), shared)
    writer = RecordWriter(file)
    simulation.run(writer)
    writer.close()
    return simulation


def records_of_kind(file: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_records(file) if line["kind"] == kind]


def without_seconds(file: Path) -> list[dict[str, Any]]:
    return [line for line in read_records(file) if line["kind"] != "round"]


def test_a_seed_gives_the_same_records_twice_and_another_seed_others(folder: Path, tmp_path: Path, shared: Shared) -> None:
    first, again, other = (tmp_path / f"{name}.gz" for name in ("first", "again", "other"))
    one = simulate(folder, first, shared)
    two = simulate(folder, again)
    simulate(folder, other, shared, seed=2)
    assert without_seconds(first) == without_seconds(again)
    assert without_seconds(first) != without_seconds(other)
    for node, same in zip(one.nodes, two.nodes, strict=True):
        weights, others = node.policy.learner.policy(), same.policy.learner.policy()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_records_keep_apart_whose_rewards_they_are_and_add_up(folder: Path, tmp_path: Path, shared: Shared) -> None:
    simulate(folder, tmp_path / "r.gz", shared, rounds=3)
    steps = records_of_kind(tmp_path / "r.gz", "step")
    assert [(line["round"], line["node"]) for line in steps] == [(r, f"n{n:02d}") for r in (1, 2, 3) for n in range(3)]
    for line in steps:
        assert line["generated"] == 2 * 16
        assert sum(count for count, _ in line["tasks"].values()) == 32
        groups = line["groups_local"] + line["groups_external"]
        parts = line["groups_local"] * line["local_reward"] + line["groups_external"] * (line["external_reward"] or 0.0)
        assert line["trained_reward"] == pytest.approx(parts / groups, abs=1e-5)
        assert line["staleness"] == 0
        assert line["informative_external"] == line["groups_external"]
    evaluations = records_of_kind(tmp_path / "r.gz", "eval")
    assert Counter(line["round"] for line in evaluations) == {0: 3, 2: 3, 3: 3}
    assert len({line["pass_rate"] for line in evaluations if line["round"] == 0}) == 1


def test_a_node_steers_by_the_held_out_results_that_are_written_dataset_by_dataset(
    folder: Path, tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SamplerSection, "adapt_period", 1)
    moving = {"adapt": "adaptive"}
    simulation = simulate(folder, tmp_path / "r.gz", shared, rounds=3, sampler=moving)
    written = {line["node"]: line["tasks"] for line in records_of_kind(tmp_path / "r.gz", "eval") if line["round"] == 3}
    followed = {line["node"]: line["tasks"] for line in records_of_kind(tmp_path / "r.gz", "eval") if line["round"] == 2}
    for node in simulation.honest:
        assert node.evaluation is not None
        known = {name: [s.n, s.pass_rate, s.mean_reward] for name, s in node.evaluation.per_task.items()}
        assert known.keys() == written[node.name].keys()
        assert all(figures == pytest.approx(written[node.name][name], abs=1e-6) for name, figures in known.items())
        batch = simulation.batches[node.name]
        assert batch is not None and batch.state.sharing is not None
        levels = {level.dataset: [level.n, level.rate] for level in batch.state.sharing.datasets}
        assert levels.keys() == followed[node.name].keys()
        assert all(figures == pytest.approx(followed[node.name][name][:2], abs=1e-6) for name, figures in levels.items())


def test_the_pool_is_this_rounds_groups_unless_older_ones_are_allowed(folder: Path, tmp_path: Path, shared: Shared) -> None:
    simulate(folder, tmp_path / "now.gz", shared, rounds=4, sampler={"external": 1})
    simulate(folder, tmp_path / "older.gz", shared, rounds=4, sampler={"external": 1, "max_external_age_s": 1000.0})
    now, older = (records_of_kind(tmp_path / name, "step") for name in ("now.gz", "older.gz"))
    assert max(line["pool_external"] for line in now) <= 4
    assert any((line["external_age_rounds"] or 0) >= 1 for line in older)
    assert all((line["external_age_rounds"] or 0) < 1 for line in now)


def test_groups_that_travel_for_rounds_are_seen_as_old_as_they_are(folder: Path, tmp_path: Path, shared: Shared) -> None:
    late = {"delay_rounds": [2, 4], "sampler": {"external": 3, "max_external_age_s": 1000.0}}
    simulate(folder, tmp_path / "late.gz", shared, rounds=7, **late)
    steps = records_of_kind(tmp_path / "late.gz", "step")
    assert all(line["groups_external"] == 0 for line in steps if line["round"] <= 2)
    ages = [line["external_age_rounds"] for line in steps if line["groups_external"]]
    assert ages
    assert min(ages) >= 2
    with pytest.raises(SpecError, match="delay_rounds: give the minimum and maximum"):
        tiny_spec(folder, delay_rounds=[3, 2])


def test_a_node_without_held_out_questions_is_not_evaluated_and_the_others_are(
    folder: Path, tmp_path: Path, shared: Shared
) -> None:
    simulate(folder, tmp_path / "r.gz", shared, rounds=2, nodes=[{"count": 2}, {"eval": {"tasks": 0}}])
    assert {line["node"] for line in records_of_kind(tmp_path / "r.gz", "eval")} == {"n00", "n01"}
    assert {line["node"] for line in records_of_kind(tmp_path / "r.gz", "step")} == {"n00", "n01", "n02"}


def test_a_stale_node_trains_on_what_an_older_policy_said(folder: Path, tmp_path: Path, shared: Shared) -> None:
    simulate(folder, tmp_path / "r.gz", shared, rounds=4, nodes=1, sampler={"max_staleness": 2, "external": 0})
    steps = records_of_kind(tmp_path / "r.gz", "step")
    assert [line["generated"] for line in steps] == [3 * 32, 32, 32, 32]
    assert [line["staleness"] for line in steps] == [0, 1, 2, 2]


def test_own_replay_is_the_samplers_and_no_figure_of_new_groups_counts_it(
    folder: Path, tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SamplerSection, "replay_batches", 2)
    sampler = {"local": 3, "external": 0, "replay": 2}
    simulation = simulate(folder, tmp_path / "replay.gz", shared, nodes=1, rounds=5, sampler=sampler)
    informative: list[int] = []
    for line in records_of_kind(tmp_path / "replay.gz", "step"):
        replayed = line.get("groups_replayed", 0)
        assert replayed == min(2, sum(informative[-2:])) == line.get("informative_replayed", 0)
        assert (line["made"], line["groups_local"], line["staleness"]) == (3, 3, 0)
        assert line["generated"] == 3 * 16 and line["informative_local"] == line["made_informative"]
        parts = 3 * line["local_reward"] + replayed * line.get("replayed_reward", 0.0)
        assert line["trained_reward"] == pytest.approx(parts / (3 + replayed), abs=1e-5)
        informative.append(line["made_informative"])
    assert sum(informative) > 2, "there was something to replay"
    batch = simulation.batches["n00"]
    assert batch is not None and {item.replayed for item in batch.items} == {False, True}
    assert [item.staleness for item in batch.items if item.replayed] == [
        4 - item.scored.group.policy_version for item in batch.items if item.replayed
    ]


def test_nodes_of_two_architectures_learn_from_each_others_text(folder: Path, tmp_path: Path, shared: Shared) -> None:
    other = tiny_qwen3(tmp_path / "other", tied=False, seed=4)
    nodes = [{"count": 2}, {"count": 1, "model": {"path": str(other)}}]
    simulate(folder, tmp_path / "r.gz", shared, nodes=nodes, verifier={"share_tokens": False})
    assert any(line["groups_external"] for line in records_of_kind(tmp_path / "r.gz", "step") if line["node"] == "n02")


def test_text_alone_is_trained_on_without_weights_and_shared_tokens_with_them(folder: Path, tmp_path: Path, shared: Shared) -> None:
    apart = {"sampler": {"max_external_age_s": 1000.0}, "rounds": 4, "trainer": {"learning_rate": 1e-2}}
    simulate(folder, tmp_path / "text.gz", shared, **apart, verifier={"share_tokens": False})
    simulate(folder, tmp_path / "tokens.gz", shared, **apart, verifier={"share_tokens": True})
    text, tokens = (
        [line.get("kl_behaviour", 0.0) for line in records_of_kind(tmp_path / name, "step")] for name in ("text.gz", "tokens.gz")
    )
    assert max(text) == pytest.approx(0.0, abs=1e-5)
    assert max(tokens) > 1e-4


@pytest.mark.parametrize("strategy", ["learnability", "rescue"])
def test_strategies_that_ask_the_policy_or_the_past_give_full_batches(
    folder: Path, tmp_path: Path, shared: Shared, strategy: str
) -> None:
    sampler = {"strategy": strategy, "external": 1, "max_external_age_s": 1000.0}
    simulate(folder, tmp_path / "r.gz", shared, rounds=4, sampler=sampler)
    late = [line for line in records_of_kind(tmp_path / "r.gz", "step") if line["round"] > 1]
    assert all(line["groups_external"] <= 1 for line in late)
    assert any(line["groups_external"] == 1 for line in late)
    assert all(strategy in line["strategy"] for line in late)


def test_adaptive_nodes_make_as_many_groups_as_their_next_batch_takes(
    folder: Path, tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SamplerSection, "adapt_period", 2)
    monkeypatch.setattr(SamplerSection, "adapt_informative", (0.0, 0.05))
    sampler = {"local": 2, "external": 2, "adapt": "adaptive"}
    simulate(folder, tmp_path / "r.gz", shared, rounds=10, sampler=sampler)
    steps = records_of_kind(tmp_path / "r.gz", "step")
    assert len({line["made"] for line in steps}) > 1
    assert all(2 <= line["made"] <= 4 for line in steps)
