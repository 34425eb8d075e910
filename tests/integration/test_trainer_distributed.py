"""Several processes train one policy as one process does: the learner that the service uses, its
checkpoints and what it publishes.

What should come out, written down before it was measured: in float32 a step's gradient norm agrees
to 1e-6; weights after several steps agree, relative to how far they moved, to 1e-4, because Adam
divides small gradients by themselves. The same number of processes gives the same bits each time,
and what is restored is what was saved. `test_trainer_distributed_gradients.py` has what lies below
the learner, in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.checkpoint import LearnerState
from services.trainer.torchrun import Place
from shared.config import NodeConfig
from shared.config.model_section import ModelSection
from shared.contracts.messages import Batch
from shared.model.reading import load_tokenizer
from shared.runtime import FatalError
from tests.constants import with_constants
from tests.integration.trainer_fixtures import model
from tests.integration.trainer_life import batch_of, config_for, mixed_batch, node_config, scored_group, through_a_file
from tests.integration.trainer_ranks import in_ranks, joined, train_alone, train_together

__all__ = ["model"]


@pytest.fixture(scope="module")
def batches(model: Path) -> list[Batch]:
    tokenizer = load_tokenizer(ModelSection(path=str(model)))
    mixed = [mixed_batch(tokenizer, number) for number in range(1, 7)]
    # The third has nothing to learn from, the fourth has less to do than there are processes.
    mixed[2] = batch_of(3, [scored_group(tokenizer, random.Random(3), rewards=(1.0, 1.0))])
    mixed[3] = batch_of(4, [scored_group(tokenizer, random.Random(4), rewards=(1.0, 0.0))])
    return mixed


# Float32: the learner that the service uses, step by step.

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "proximal, reference, own policy": {
        "updates_per_batch": 2,
        "kl_coefficient": 0.1,
        "gradient_checkpointing": True,
        "token_budget": 64,
        "constants": {"policy_check_fraction": 1.0, "min_foreign_logprob": -6.0},
    },
    "foreign groups checked and bounded in the pass": {
        "updates_per_batch": 2,
        "token_budget": 64,
        "constants": {"foreign_norm_factor": 0.5, "min_foreign_logprob": -7.0},
    },
    "adapters": {"lora": {"rank": 2}, "gradient_checkpointing": True, "objective": "gspo"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_processes_train_the_policy_of_one(model: Path, batches: list[Batch], setting: str, tmp_path: Path) -> None:
    config = config_for(model, **SETTINGS[setting])
    alone = train_alone(config, batches)
    together = train_together(config, batches, folder=tmp_path)
    assert [record.updated for record in alone.records] == [True, True, "kl_coefficient" in SETTINGS[setting], True, True, True]
    for ours, one in zip(together.records, alone.records, strict=True):
        counts = ("updated", "updates", "tokens", "groups_local", "groups_zero_advantage", "answers_absurd", "groups_bounded")
        for name in (*counts, "learning_rate"):
            assert getattr(ours, name) == getattr(one, name)
        norms = ("grad_norm", "grad_norm_local", "grad_norm_foreign")
        means = ("loss", "entropy", "kl_behaviour", "kl_reference", "importance_weight", "importance_ratio")
        for names, floor in ((norms, 0.0), (means, 1e-5)):
            for name in names:
                expected = getattr(one, name)
                assert getattr(ours, name) == (None if expected is None else pytest.approx(expected, rel=1e-4, abs=floor)), name
    assert together.records[0].grad_norm == pytest.approx(alone.records[0].grad_norm, rel=1e-6)
    for name, constant in (("groups_bounded", "foreign_norm_factor"), ("answers_absurd", "min_foreign_logprob")):
        assert any(getattr(record, name) for record in alone.records) or constant not in SETTINGS[setting].get("constants", {})
    base = flat(train_alone(config, []).policy)
    assert (flat(together.policy) - flat(alone.policy)).norm() <= 1e-4 * (flat(alone.policy) - base).norm()
    assert same_layout(together.state, alone.state)


MOST_AT_ONCE = "proximal, reference, own policy"


@pytest.mark.parametrize(
    "setting", [pytest.param(setting, marks=() if setting == MOST_AT_ONCE else pytest.mark.long) for setting in SETTINGS]
)
def test_two_processes_end_with_the_same_bits_each_time(model: Path, batches: list[Batch], setting: str, tmp_path: Path) -> None:
    config = config_for(model, **SETTINGS[setting])
    once, again = (train_together(config, batches[:4], folder=tmp_path / time) for time in ("once", "again"))
    assert all(torch.equal(value, again.policy[name]) for name, value in once.policy.items())
    assert same_bits(once.state, again.state)


def test_bfloat16_in_two_processes_differs_no_more_than_another_token_budget_does(
    model: Path, batches: list[Batch], tmp_path: Path
) -> None:
    def config(token_budget: int) -> NodeConfig:
        # Without what decides by thresholds, at which a rounding takes a whole group in or leaves
        # it out; and with others' wrong answers, so that the smaller budget cuts the batch in more
        # parts.
        trainer = {
            "token_budget": token_budget,
            "constants": {
                "adam_eps": 1e-3,
                "policy_check_fraction": 0.0,
                "foreign_norm_factor": 0.0,
                "drop_foreign_negatives": False,
            },
        }
        return node_config(model, tmp_path, model_section={"dtype": "bfloat16"}, trainer=trainer)

    alone = train_alone(config(16_384), batches[:2])
    cut = train_alone(with_constants(config(64), trainer={"packed_rows": False}), batches[:2])
    together = train_together(config(16_384), batches[:2], folder=tmp_path)
    expected = (flat(cut.state.weights) - flat(alone.state.weights)).norm()
    assert expected > 0 and (flat(together.state.weights) - flat(alone.state.weights)).norm() < 3 * expected
    assert {value.dtype for value in together.policy.values()} == {torch.bfloat16}
    assert {value.dtype for value in together.state.weights.values()} == {torch.float32}


# Checkpoints: those of one process and of several are the same.


@pytest.mark.parametrize("trainer", [{}, {"lora": {"rank": 2}}], ids=["whole", "adapters"])
def test_training_goes_on_from_one_process_to_two_and_back(
    model: Path, batches: list[Batch], trainer: dict[str, Any], tmp_path: Path
) -> None:
    config = config_for(model, **trainer)
    whole = train_alone(config, batches)
    first = train_alone(config, batches[:2])
    unchanged = train_together(config, [], through_a_file(first.state, tmp_path / "first"), folder=tmp_path / "unchanged")
    assert same_bits(unchanged.state, first.state)
    assert all(torch.equal(value, unchanged.policy[name]) for name, value in first.policy.items())

    second = train_together(config, batches[2:4], through_a_file(first.state, tmp_path / "first"), folder=tmp_path / "second")
    last = train_alone(config, batches[4:], through_a_file(second.state, tmp_path / "second"))
    base = flat(train_alone(config, []).policy)
    assert (flat(last.policy) - flat(whole.policy)).norm() <= 1e-4 * (flat(whole.policy) - base).norm()


def test_two_processes_that_are_started_again_end_with_the_same_bits(model: Path, batches: list[Batch], tmp_path: Path) -> None:
    config = config_for(model, lora={"rank": 4})
    whole = train_together(config, batches[:4], folder=tmp_path / "whole")
    first = train_together(config, batches[:2], folder=tmp_path / "first")
    last = train_together(config, batches[2:4], through_a_file(first.state, tmp_path / "saved"), folder=tmp_path / "last")
    assert same_bits(last.state, whole.state)


@pytest.mark.parametrize("publish_dtype", ["auto", pytest.param("float32", marks=pytest.mark.long)])
def test_three_processes_merge_adapters_and_measure_what_rounding_loses_as_one_does(
    model: Path, batches: list[Batch], publish_dtype: str, tmp_path: Path
) -> None:
    trainer = {
        "learning_rate": 1e-4,
        "lora": {"rank": 4, "publish": "merged"},
        "publish_dtype": publish_dtype,
        "constants": {"adam_eps": 1e-3},
    }
    config = node_config(model, model.parent, model_section={"dtype": "bfloat16"}, trainer=trainer)
    trained = train_alone(config, batches[:1])
    expected = train_alone(config, [], trained.state)
    found = train_together(config, [], through_a_file(trained.state, tmp_path / "saved"), ranks=3, folder=tmp_path / "ranks")
    assert all(torch.equal(value, found.policy[name]) for name, value in expected.policy.items())
    assert {value.dtype for value in found.policy.values()} == {torch.float32 if publish_dtype == "float32" else torch.bfloat16}
    assert expected.rounding is not None and found.rounding is not None
    assert found.rounding.lost_ratio == pytest.approx(expected.rounding.lost_ratio, abs=1e-5)
    assert found.rounding.unmoved_ratio == expected.rounding.unmoved_ratio
    assert (found.rounding.lost_ratio > 0.5) == (publish_dtype == "auto")


def test_three_processes_publish_the_adapters_that_one_does(model: Path, batches: list[Batch], tmp_path: Path) -> None:
    config = node_config(model, model.parent, trainer={"learning_rate": 1e-4, "lora": {"rank": 4}, "constants": {"adam_eps": 1e-3}})
    trained = train_alone(config, batches[:1])
    expected = train_alone(config, [], trained.state)
    found = train_together(config, [], through_a_file(trained.state, tmp_path / "saved"), ranks=3, folder=tmp_path / "ranks")
    assert expected.policy and all(".lora_" in name for name in expected.policy)
    assert expected.policy.keys() == found.policy.keys()
    assert all(torch.equal(value, found.policy[name]) for name, value in expected.policy.items())


# Refusals.


def refusal(place: Place, configs: list[NodeConfig]) -> str:
    try:
        joined(place, configs[place.rank])
    except FatalError as error:
        return str(error)
    return "accepted"


def test_processes_with_different_configurations_are_refused_with_a_remedy(model: Path, tmp_path: Path) -> None:
    configs = [config_for(model), config_for(model, learning_rate=0.5)]
    for said in in_ranks(refusal, configs, ranks=2, folder=tmp_path):
        assert "ranks [1] have another configuration" in said and "same files and environment" in said


def test_a_place_that_makes_no_sense_and_a_gpu_for_several_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FatalError, match="RANK=2, WORLD_SIZE=2, LOCAL_RANK=0 is not a valid rank .* start with torchrun"):
        Place.of({"RANK": "2", "WORLD_SIZE": "2"})
    assert Place.of({}) == Place(0, 1, 0)
    # This machine has no GPU: what torch says of one is given.
    monkeypatch.setattr("services.trainer.torchrun.resolve_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Place(1, 2, 1).device("cuda") == torch.device("cuda", 1)
    with pytest.raises(FatalError, match="each of 2 processes needs its own GPU: set it to auto"):
        Place(1, 2, 1).device("cuda:0")
    with pytest.raises(FatalError, match="has no GPU, because there are only 2: lower torchrun's --nproc-per-node"):
        Place(2, 3, 2).device("cuda")


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def same_layout(one: LearnerState, other: LearnerState) -> bool:
    """Return whether a checkpoint of one can be told from a checkpoint of the other only by its
    numbers.
    """

    def outline(value: object) -> object:
        return (value.shape, value.dtype, value.device, type(value)) if isinstance(value, Tensor) else value

    return mapped(one, outline) == mapped(other, outline)


def same_bits(one: LearnerState, other: LearnerState) -> bool:
    return mapped(one, lambda value: value.tolist() if isinstance(value, Tensor) else value) == mapped(
        other, lambda value: value.tolist() if isinstance(value, Tensor) else value
    )


def mapped(state: LearnerState, change: Callable[[object], object]) -> object:
    def walk(value: object) -> object:
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        return [walk(inner) for inner in value] if isinstance(value, list) else change(value)

    return [walk(part) for part in (state.weights, state.optimizer, state.random, len(state.recent_norms))]
