"""The learner: deterministic, resumable, and it learns what the rewards say."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import services.trainer.policy_model as policy_model
from services.trainer.gradient.forward import SeparateHead, completion_logprobs
from services.trainer.gradient.importance import ImportanceConfig
from services.trainer.gradient.rows import build_rows, plan_rows
from services.trainer.gradient.update import UpdateConfig, batch_logprobs
from services.trainer.learner import Learner, learning_rate
from services.trainer.selection.intake import take_in
from shared.config import NodeConfig
from shared.config.model_section import ModelSection
from shared.contracts.codec import pack_logprobs
from shared.contracts.messages import Batch, ScoredGroup
from shared.model.reading import load_tokenizer
from shared.registry import OBJECTIVES
from tests.integration.trainer_life import (
    batch_of,
    mixed_batch,
    node_config,
    same_policy,
    scored_group,
    through_a_file,
    tiny_policy,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


def config_for(model: Path, **trainer: Any) -> NodeConfig:
    return node_config(model, model.parent, trainer=trainer)


def with_logprobs(model: Path, group: ScoredGroup, off: float) -> ScoredGroup:
    """The group as a policy would have sampled it that finds each token `off` nats less likely than
    the policy at `model` does.
    """
    learner = Learner(config_for(model))
    taken = take_in(batch_of(1, [group]), learner.rules).groups
    ((*logprobs,),) = batch_logprobs(learner.model, [replace(taken[0], weight=1.0)], _SCORES_ALL, counted=True)
    completions = [
        structs.replace(completion, behaviour_logprobs=pack_logprobs((each - off).tolist()))
        for completion, each in zip(group.group.completions, logprobs, strict=True)
    ]
    return structs.replace(group, group=structs.replace(group.group, completions=completions))


_SCORES_ALL = UpdateConfig(importance=ImportanceConfig(sequence_bounds=(0.5, 2.0)), count_uninformative=True)


def trained(learner: Learner, first: int, last: int) -> Learner:
    for number in range(first, last + 1):
        learner.step(mixed_batch(learner.tokenizer, number))
    return learner


@pytest.mark.slow
def test_the_same_configuration_and_batches_give_the_same_weights_bit_for_bit(model: Path) -> None:
    config = config_for(model)
    assert same_policy(trained(Learner(config), 1, 4), trained(Learner(config), 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"schedule": "cosine", "max_steps": 5, "warmup_steps": 2},
        {"lora": {"rank": 4}},
        {"updates_per_batch": 2, "kl_coefficient": 0.1},
    ],
    ids=["plain", "schedule", "lora", "updates-and-reference"],
)
def test_a_restored_learner_goes_on_as_if_nothing_had_happened(model: Path, tmp_path: Path, trainer: dict[str, Any]) -> None:
    config = config_for(model, **trainer)
    whole = trained(Learner(config), 1, 5)
    random_after_whole = torch.get_rng_state()

    first = trained(Learner(config), 1, 2)
    state = through_a_file(first.state(), tmp_path)
    second = Learner(config)
    torch.manual_seed(999)
    second.restore(state)
    trained(second, 3, 5)
    assert same_policy(whole, second)
    assert torch.equal(random_after_whole, torch.get_rng_state())


def test_nothing_is_held_between_steps_but_weights_and_moments(model: Path) -> None:
    learner = trained(Learner(config_for(model)), 1, 2)
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_one_update_has_ratio_one_and_several_updates_move_away_from_it_and_clip(model: Path) -> None:
    once = Learner(config_for(model, learning_rate=0.05)).step(batch(model))
    assert (once.updates, once.importance_ratio, once.importance_ratio_max, once.clip_fraction) == (1, 1.0, 1.0, 0.0)
    often = Learner(config_for(model, learning_rate=0.05, updates_per_batch=4)).step(batch(model))
    assert often.updates == 4 and often.importance_ratio_max > 1.28 and often.clip_fraction > 0.0


def test_the_reference_divergence_is_zero_at_the_base_policy_and_grows_as_it_moves(model: Path) -> None:
    learner = Learner(config_for(model, kl_coefficient=0.05))
    first, second = (learner.step(mixed_batch(learner.tokenizer, number)) for number in (1, 2))
    assert first.kl_reference == pytest.approx(0.0, abs=1e-7) and second.kl_reference > 1e-4
    assert Learner(config_for(model))._reference is None


def test_rewarded_completions_become_likelier_and_others_less_likely(model: Path) -> None:
    learner = Learner(config_for(model, learning_rate=3e-3))
    lesson = batch(model)
    before = mean_logprobs(learner, lesson)
    for _ in range(5):
        learner.step(lesson)
    after = mean_logprobs(learner, lesson)
    assert after[1.0] > before[1.0] + 0.1 and after[0.0] < before[0.0] - 0.1


def test_gradient_checkpointing_changes_memory_and_not_the_result(model: Path) -> None:
    plain = trained(Learner(config_for(model)), 1, 2).policy()
    frugal = trained(Learner(config_for(model, gradient_checkpointing=True)), 1, 2).policy()
    assert all(torch.allclose(plain[name], frugal[name], atol=1e-6) for name in plain)


def test_bfloat16_trains_float32_weights_and_publishes_bfloat16(model: Path) -> None:
    learner = Learner(node_config(model, model.parent, model_section={"dtype": "bfloat16"}))
    before = learner.policy()
    assert learner.step(batch(model)).updated
    after = learner.policy()
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert {value.dtype for value in learner.state().weights.values()} == {torch.float32}
    assert any(not torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.slow
def test_adapters_train_with_gradient_checkpointing_as_without(model: Path) -> None:
    lora = {"rank": 2, "publish": "merged"}
    plain = trained(Learner(config_for(model, lora=lora)), 1, 2)
    frugal = trained(Learner(config_for(model, lora=lora, gradient_checkpointing=True)), 1, 2)
    base = Learner(config_for(model)).policy()
    assert all(torch.allclose(plain.policy()[name], value, atol=1e-6) for name, value in frugal.policy().items())
    assert any(not torch.equal(base[name], value) for name, value in frugal.policy().items())


def test_plain_and_packed_rows_train_the_same_policy(model: Path) -> None:
    packed = Learner(config_for(model, learning_rate=1e-4))
    plain = Learner(config_for(model, packed_rows=False, learning_rate=1e-4))
    assert packed.update_config.packed and not plain.update_config.packed
    left, right = trained(packed, 1, 1).policy(), trained(plain, 1, 1).policy()
    norms = [float((left[name] - right[name]).abs().max()) for name in left]
    # Adam's first step has the size of the learning rate whatever the gradient's, so tiny gradients
    # may differ in sign.
    assert sum(norm > 1e-5 for norm in norms) <= 1


def test_a_gradient_that_is_not_finite_leaves_the_weights_and_is_said(model: Path) -> None:
    learner = Learner(config_for(model))
    with torch.no_grad():
        learner.model.get_input_embeddings().weight[65] = float("nan")
    before = {name: value.clone() for name, value in learner.policy().items()}
    record = learner.step(batch(model))
    assert not record.updated and record.updates == 0
    after = learner.policy()
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)


def test_foreign_groups_of_weight_zero_change_nothing(model: Path) -> None:
    config = config_for(model, external_weight=0.0)
    with_others, alone = Learner(config), Learner(config)
    tokenizer = alone.tokenizer
    own = [scored_group(tokenizer, random.Random(1)), scored_group(tokenizer, random.Random(2))]
    foreign = scored_group(tokenizer, random.Random(3), origin="external")
    with_others.step(batch_of(1, [*own, foreign]))
    alone.step(batch_of(1, own))
    assert same_policy(with_others, alone)


def test_settings_that_do_not_fit_the_objective_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="dual_clip is for objectives that clip, and reinforce does not"):
        Learner(config_for(model, objective="reinforce", dual_clip=3.0))


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES.built_in)
def test_every_objective_of_the_configuration_trains(model: Path, objective: str) -> None:
    learner = Learner(config_for(model, objective=objective))
    before = {name: value.clone() for name, value in learner.policy().items()}
    record = learner.step(batch(model))
    assert record.updated and record.grad_norm > 0.0
    assert any(not torch.equal(before[name], value) for name, value in learner.policy().items())


@pytest.mark.slow
def test_grpo_counts_groups_without_spread_and_dapo_does_not(model: Path) -> None:
    tokenizer = load_tokenizer(ModelSection(path=str(model)))
    useful = scored_group(tokenizer, random.Random(1))
    dull = scored_group(tokenizer, random.Random(2), rewards=(1.0, 1.0, 1.0, 1.0))

    def norm(groups: list[Any], **trainer: Any) -> float:
        return Learner(config_for(model, **trainer)).step(batch_of(1, groups)).grad_norm

    alone = norm([useful], objective="grpo")
    # Both have four answers: counted, the second halves the mean.
    assert norm([useful, dull], objective="grpo") == pytest.approx(alone / 2, rel=1e-4)
    assert norm([useful, dull], objective="grpo", count_uninformative=False) == pytest.approx(alone, rel=1e-4)
    assert norm([useful, dull], objective="dapo") == pytest.approx(norm([useful], objective="dapo"), rel=1e-4)
    uncounted = norm([useful, dull], objective="gspo", count_uninformative=False)
    assert norm([useful, dull], objective="gspo") < 0.6 * uncounted


def test_a_sequence_mask_takes_answers_out_of_the_mean_in_groups_without_spread_too(model: Path) -> None:
    tokenizer = load_tokenizer(ModelSection(path=str(model)))
    useful = scored_group(tokenizer, random.Random(1))
    dull = scored_group(tokenizer, random.Random(2), rewards=(1.0, 1.0, 1.0, 1.0))
    useful, near, far = (with_logprobs(model, group, off) for group, off in ((useful, 0.0), (dull, 0.0), (dull, 5.0)))

    def norm(groups: list[Any]) -> float:
        return Learner(config_for(model, objective="grpo", sequence_mask=[0.5, 2.0])).step(batch_of(1, groups)).grad_norm

    assert norm([useful, near]) == pytest.approx(norm([useful]) / 2, rel=1e-4)
    assert norm([useful, far]) == pytest.approx(norm([useful]), rel=1e-4)


def test_m2po_decides_its_mask_anew_before_each_update(model: Path) -> None:
    """What the first update made much likelier than its author did is masked in the second."""
    tokenizer = load_tokenizer(ModelSection(path=str(model)))
    groups = [with_logprobs(model, scored_group(tokenizer, random.Random(1)), 0.0)]

    def masked(updates: int) -> float:
        settings = {"objective": "m2po", "learning_rate": 1e-2, "updates_per_batch": updates}
        return Learner(config_for(model, **settings)).step(batch_of(1, groups)).clip_fraction

    assert masked(1) == 0.0 < masked(4)


def test_aggregation_and_the_standard_deviation_follow_the_configuration(model: Path) -> None:
    plain = Learner(config_for(model, objective="grpo"))
    changed = Learner(config_for(model, objective="grpo", aggregation="token_mean", advantage_std_ddof=0))
    assert plain.update_config.objective.aggregated_by == "sequence_mean"
    assert changed.update_config.objective.aggregated_by == "token_mean"
    assert (plain.rules.advantages.std_ddof, changed.rules.advantages.std_ddof) == (1, 0)


def test_a_learner_of_a_large_vocabulary_computes_logits_in_chunks_and_learns_the_same(model: Path, monkeypatch: Any) -> None:
    lesson = batch(model)
    at_once = Learner(config_for(model))
    assert at_once.update_config.separate_head is None, "the test's logits fit into one chunk"
    monkeypatch.setattr(policy_model, "CHUNK_BYTES", 4096)
    in_chunks = Learner(config_for(model))
    separate = in_chunks.update_config.separate_head
    assert isinstance(separate, SeparateHead)
    in_chunks.update_config = replace(in_chunks.update_config, separate_head=replace(separate, chunk_bytes=4096))
    ours, theirs = in_chunks.step(lesson), at_once.step(lesson)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    assert ours.entropy == pytest.approx(theirs.entropy, rel=1e-6)


def test_the_learning_rate_warms_up_and_falls_as_in_the_worked_example() -> None:
    def rates(kind: Any, last: int) -> list[float]:
        return [learning_rate(step, peak=1.0, warmup_steps=2, kind=kind, end_step=6) for step in range(1, last + 1)]

    assert rates("linear", 8) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert rates("constant", 4) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert rates("cosine", 7) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def batch(model: Path) -> Batch:
    return mixed_batch(load_tokenizer(ModelSection(path=str(model))), 1)


def mean_logprobs(learner: Learner, lesson: Batch) -> dict[float, float]:
    """Mean logprob per token of the first group's completions, by reward."""
    group = take_in(lesson, learner.rules).groups[0]
    rows = build_rows([group], plan_rows([group], packed=False, budget_tokens=10_000), packed=False)
    with torch.no_grad():
        scored = completion_logprobs(learner.model, rows).logprobs
    rewards = lesson.items[0].scored.rewards
    means: dict[float, list[float]] = {}
    for row, (_, completion) in enumerate(rows.sequences):
        length = len(group.completions[completion])
        means.setdefault(rewards[completion], []).append(float(scored[row, :length].mean()))
    return {reward: sum(values) / len(values) for reward, values in means.items()}
