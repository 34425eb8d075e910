"""Settings that can do nothing are named; and what is said of them is what the trainer does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learner import Learner
from services.trainer.service import TrainerService
from shared.config import load_config
from shared.runtime import FatalError
from swarm_cli.config_checks import check_objective
from swarm_cli.errors import CommandError
from swarm_cli.without_effect import settings_without_effect
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy

ROOT = Path(__file__).parents[2]


def said(trainer: dict[str, Any] | None = None, sampler: dict[str, Any] | None = None) -> list[str]:
    return settings_without_effect(
        load_config(None, {"tasks": [{"dataset": "gcd"}], "trainer": trainer or {}, "sampler": sampler or {}})
    )


BY_ONE = "trainer.updates_per_batch is 1, so the clipped ratio is 1"


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"m2_threshold": 0.05}, "trainer.m2_threshold = 0.05 has no effect: trainer.objective is dapo, not m2po"),
        (
            {"objective": "oapl", "vespo_positive": [1.5, 3.0]},
            "trainer.vespo_positive = [1.5, 3.0] has no effect: trainer.objective is oapl, not vespo",
        ),
        ({"oapl_scale": 0.01}, "trainer.oapl_scale = 0.01 has no effect: trainer.objective is dapo, not oapl"),
        ({"cispo_max": 4.0}, "trainer.cispo_max = 4.0 has no effect: trainer.objective is dapo, not cispo"),
        (
            {"objective": "rloo", "clip_low": 0.1},
            "trainer.clip_low = 0.1 has no effect: trainer.objective is rloo, which does not clip",
        ),
        (
            {"clip_high": 0.3},
            f"trainer.clip_high = 0.3 has no effect: {BY_ONE}",
        ),
        (
            {"dual_clip": 3.0},
            f"trainer.dual_clip = 3.0 has no effect: {BY_ONE}",
        ),
        (
            {"objective": "cispo", "cispo_max": 4.0},
            f"trainer.cispo_max = 4.0 has no effect: {BY_ONE}",
        ),
        (
            {"objective": "vespo", "importance_cap": 1.0},
            "trainer.importance_cap = 1.0 has no effect: trainer.objective is vespo, which has no importance weights",
        ),
        (
            {"objective": "oapl", "advantage_scale": "none"},
            "trainer.advantage_scale = none has no effect: trainer.objective is oapl, which does not divide by a deviation",
        ),
        (
            {"advantage_scale": "none", "advantage_std_floor": 0.1},
            "trainer.advantage_std_floor = 0.1 has no effect: trainer.advantage_scale is none",
        ),
        (
            {"objective": "grpo", "foreign_share_factor": 2.0},
            "trainer.foreign_share_factor = 2.0 has no effect: the loss is a mean over sequences, whatever their tokens",
        ),
        (
            {"foreign_weight_negative": "one"},
            "trainer.foreign_weight_negative = one has no effect: trainer.drop_foreign_negatives is true",
        ),
        (
            {"foreign_negative_divergence": 0.5},
            "trainer.foreign_negative_divergence = 0.5 has no effect: trainer.drop_foreign_negatives is true",
        ),
        (
            {"foreign_weight_level": "sequence"},
            "trainer.foreign_weight_level = sequence has no effect: "
            "trainer.foreign_weight_positive is one and trainer.drop_foreign_negatives is true",
        ),
        (
            {"foreign_capability_bounds": [0.5, 2.0]},
            "trainer.foreign_capability_bounds = [0.5, 2.0] has no effect: trainer.foreign_capability_window is 0",
        ),
        (
            {"policy_check_fraction": 0.0, "foreign_logprob_slack": None},
            "trainer.foreign_logprob_slack = none has no effect: trainer.policy_check_fraction is 0",
        ),
        (
            {"foreign_norm_factor": 0.0, "foreign_norm_proportion": 2.0},
            "trainer.foreign_norm_proportion = 2.0 has no effect: trainer.foreign_norm_factor is 0",
        ),
        ({"schedule_steps": 100}, "trainer.schedule_steps = 100 has no effect: trainer.schedule is constant"),
        ({"lora": {"alpha": 32.0}}, "trainer.lora.alpha = 32.0 has no effect: trainer.lora.rank is 0"),
        ({"lora": {"publish": "merged"}}, "trainer.lora.publish = merged has no effect: trainer.lora.rank is 0"),
        (
            {"lora": {"rank": 4}, "publish_dtype": "float32"},
            "trainer.publish_dtype = float32 has no effect: trainer.lora.publish is adapters, which are published in float32",
        ),
    ],
)
def test_a_setting_of_the_trainer_that_cannot_act_is_named_with_the_reason(trainer: dict[str, Any], sentence: str) -> None:
    assert said(trainer) == [sentence]


@pytest.mark.parametrize(
    ("sampler", "sentence"),
    [
        ({"replay_batches": 5}, "sampler.replay_batches = 5 has no effect: sampler.replay is 0"),
        ({"external": 0, "strategy": "rescue"}, "sampler.strategy = rescue has no effect: sampler.external is 0"),
        ({"external": 0, "max_share_per_node": 1.0}, "sampler.max_share_per_node = 1.0 has no effect: sampler.external is 0"),
        (
            {"strategy": "uniform", "oversample": 4.0},
            "sampler.oversample = 4.0 has no effect: sampler.strategy is uniform, not likelihood_near",
        ),
        ({"adapt": "off", "adapt_period": 4}, "sampler.adapt_period = 4 has no effect: sampler.adapt is off"),
        ({"shortage": "wait", "shortage_wait_s": 1.0}, "sampler.shortage_wait_s = 1.0 has no effect: sampler.shortage is wait"),
    ],
)
def test_a_setting_of_the_sampler_that_cannot_act_is_named_with_the_reason(sampler: dict[str, Any], sentence: str) -> None:
    assert said(sampler=sampler) == [sentence]


def test_nothing_is_said_of_settings_of_foreign_text_alone_but_that_there_is_none() -> None:
    found = said({"external_weight": 0.5, "foreign_weight_level": "sequence"}, {"external": 0})
    assert len(found) == 2 and all(sentence.endswith("has no effect: sampler.external is 0") for sentence in found)


@pytest.mark.parametrize(
    ("trainer", "sampler"),
    [
        ({}, {}),
        ({"m2_threshold": 0.04}, {}),
        ({"objective": "m2po", "m2_threshold": 0.05}, {}),
        ({"objective": "gepo", "clip_low": 0.1, "sequence_mask": [0.5, 2.0], "kl_coefficient": 0.1}, {}),
        ({"objective": "vespo", "vespo_positive": [1.5, 3.0], "kl_coefficient": 0.1}, {}),
        ({"objective": "cispo", "cispo_max": 0.9}, {}),
        ({"clip_low": 0.1, "dual_clip": 3.0, "updates_per_batch": 2}, {}),
        ({"clip_low": 0.1, "sequence_mask": [0.5, 2.0]}, {}),
        ({"drop_foreign_negatives": False, "foreign_weight_negative": "one", "foreign_weight_positive": "capped"}, {}),
        ({"foreign_negative_divergence": 0.5, "lora": {"rank": 4, "dropout": 0.1}}, {}),
        ({"objective": "grpo", "aggregation": "token_mean", "foreign_share_factor": 2.0}, {}),
        ({}, {"strategy": "likelihood_near", "oversample": 4.0}),
        ({}, {"replay": 4, "replay_batches": 5, "adapt": "off"}),
    ],
)
def test_nothing_is_said_of_a_setting_that_acts_or_has_its_default(trainer: dict[str, Any], sampler: dict[str, Any]) -> None:
    assert said(trainer, sampler) == []


@pytest.mark.parametrize(
    "file", [*sorted(ROOT.glob("config/*.toml")), *sorted(ROOT.glob("k8s/**/node.toml"))], ids=lambda path: path.name
)
def test_the_configurations_that_ship_hold_nothing_without_effect(file: Path) -> None:
    assert settings_without_effect(load_config(file)) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


def weights_after_a_step(model: Path, **trainer: Any) -> torch.Tensor:
    """Of two local groups, one foreign group with its author's logprobs and a long one without,
    rewards of both signs in all.
    """
    config = node_config(model, model.parent, sampler={"external": 2}, nats={"swarm_url": "nats://localhost:1"}, trainer=trainer)
    learner = Learner(config)
    rng = random.Random(5)
    rewards = (0.0, 1.0, 0.25, 0.0, 1.0, 0.5, 0.0, 0.1)
    groups = [
        *(scored_group(learner.tokenizer, rng) for _ in range(2)),
        scored_group(learner.tokenizer, rng, origin="external", rewards=rewards * 4),
        scored_group(learner.tokenizer, rng, origin="external", rewards=rewards, same_tokenizer=False),
    ]
    learner.step(batch_of(1, groups))
    return torch.cat([tensor.flatten() for _, tensor in sorted(learner.policy().items())])


BOTH_SIGNS: dict[str, Any] = {"drop_foreign_negatives": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "silent", "acting"),
    [
        ("m2_threshold", 1e-3, {}, {"objective": "m2po"}),
        ("vespo_positive", [1.5, 1.0], {}, {"objective": "vespo"}),
        ("oapl_value_beta", 0.3, {"objective": "vespo"}, {"objective": "oapl"}),
        ("clip_low", 0.9, {}, {"objective": "gepo"}),
        ("clip_high", 0.01, {"objective": "cispo", "updates_per_batch": 3}, {"updates_per_batch": 3}),
        ("dual_clip", 1.01, {"clip_high": 0.0}, {"clip_high": 0.0, "updates_per_batch": 4}),
        ("cispo_max", 1.01, {"objective": "cispo"}, {"objective": "cispo", "updates_per_batch": 3}),
        ("importance_cap", 0.5, {"objective": "gepo"}, {}),
        ("unknown_behaviour_logprob", -1.0, {"objective": "vespo", **BOTH_SIGNS}, BOTH_SIGNS),
        ("unknown_behaviour_logprob", -1.0, {}, BOTH_SIGNS),
        ("foreign_weight_negative", "one", {}, BOTH_SIGNS),
        ("foreign_negative_divergence", 0.0, {"updates_per_batch": 2}, {"updates_per_batch": 2, **BOTH_SIGNS}),
        ("foreign_weight_level", "geometric_mean", {}, BOTH_SIGNS),
        ("advantage_std_floor", 2.0, {"objective": "rloo"}, {}),
        ("advantage_std_ddof", 0, {"advantage_scale": "none"}, {}),
        ("foreign_share_factor", 0.5, {"objective": "gspo"}, {}),
        ("min_foreign_logprob", -0.1, {"policy_check_fraction": 0.0}, {}),
        ("foreign_norm_proportion", 1e6, {"foreign_norm_factor": 0.0}, {"foreign_norm_factor": 0.5}),
    ],
)
def test_what_is_said_to_have_no_effect_changes_nothing_but_rounding_and_elsewhere_it_acts(
    model: Path, key: str, value: Any, silent: dict[str, Any], acting: dict[str, Any]
) -> None:
    def noted(settings: dict[str, Any]) -> bool:
        return any(sentence.startswith(f"trainer.{key} ") for sentence in said({**settings, key: value}))

    def moved(settings: dict[str, Any]) -> float:
        difference = weights_after_a_step(model, **settings) - weights_after_a_step(model, **settings, **{key: value})
        return float(difference.abs().max())

    # A step is up to 1e-2, the learning rate.
    assert noted(silent) and moved(silent) < 1e-5
    assert not noted(acting) and moved(acting) > 1e-4


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"objective": "cispo", "dual_clip": 3.0}, "dual_clip is for objectives that clip, and cispo does not"),
        ({"objective": "rloo", "advantage_scale": "batch"}, "rloo centres each reward on the mean of the others"),
        ({"objective": "dapo", "objective_options": {"tau": 0.1}}, "objective_options are for installed objectives"),
    ],
)
def test_what_an_objective_cannot_do_is_refused_by_config_check_and_by_the_trainer(trainer: dict[str, Any], words: str) -> None:
    config = load_config(None, {"tasks": [{"dataset": "gcd"}], "trainer": trainer})
    with pytest.raises(CommandError, match=words):
        check_objective(config)
    with pytest.raises(FatalError, match=words):
        TrainerService(config)
