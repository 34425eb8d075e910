"""A training step: its loss and gradient against a plain loop, what is left out of it, and what
must not change it.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from services.trainer.gradient.importance import ImportanceConfig
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import UpdateConfig, accumulate_gradients, batch_logprobs, step_normaliser
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.token_loss import Normaliser
from tests.objectives import configured
from tests.unit.trainer_models import gradients, ragged_groups, small_model

OBJECTIVES = {
    "grpo": configured("grpo"),
    "dr_grpo": configured("dr_grpo", max_completion_tokens=12),
    "dapo": configured("dapo"),
    "gspo": configured("gspo", clip_low=0.05, clip_high=0.05),
    "cispo": configured("cispo", objective_options={"min": 0.9, "max": 1.1}),
    "reinforce": configured("reinforce"),
}


def step(model, groups, config, **arguments):
    model.zero_grad()
    stats = accumulate_gradients(model, groups, config, **arguments)
    return stats, gradients(model)


def nudge(model, size: float = 0.03) -> None:
    """Moves every weight a little, as an optimizer step would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def straightforward_loss(model, groups, config: ConfiguredObjective, proximal) -> torch.Tensor:
    """The loss with one forward pass per completion and no batching at all, behaviour and
    importance included.
    """
    sequences = sum(len(group.completions) for group in groups)
    tokens = sum(length for group in groups for length in group.completion_lengths)
    loss = torch.zeros(())
    for g, group in enumerate(groups):
        for c, completion in enumerate(group.completions):
            ids = torch.tensor([[*group.prompt_ids, *completion]])
            logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)
            ratio = (logprobs - proximal[g][c]).exp()
            if config.name == "gspo":
                ratio = (logprobs - proximal[g][c]).mean().exp()
            advantage = group.advantages[c]
            if config.name == "cispo":
                loss_t = (
                    -ratio.detach().clamp(config.settings.objective_options["min"], config.settings.objective_options["max"])
                    * advantage
                    * logprobs
                )
            elif config.name == "reinforce":
                loss_t = -advantage * logprobs
            else:
                loss_t = -torch.min(
                    ratio * advantage, ratio.clamp(1 - config.settings.clip_low, 1 + config.settings.clip_high) * advantage
                ).expand(len(completion))
            behaviour = group.behaviour_logprobs[c]
            if behaviour is not None:
                loss_t = loss_t * (proximal[g][c] - torch.tensor(behaviour)).exp().clamp(max=2.0)
            if config.aggregated_by == "token_mean":
                loss = loss + group.weight * loss_t.sum() / tokens
            elif config.aggregated_by == "fixed_length":
                loss = loss + group.weight * loss_t.sum() / sequences / config.max_completion_tokens
            elif config.aggregated_by == "sequence_sum":
                loss = loss + group.weight * loss_t.sum() / sequences
            else:
                loss = loss + group.weight * loss_t.mean() / sequences
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_equal_a_loop_over_completions_and_no_budget_changes_them(name: str) -> None:
    model = small_model(layers=1)
    groups = ragged_groups(6)
    groups[3] = replace(groups[3], weight=0.5)
    config = UpdateConfig(objective=OBJECTIVES[name], budget_tokens=1 << 20)
    proximal = batch_logprobs(model, groups, config)
    nudge(model)

    model.zero_grad()
    expected_loss = straightforward_loss(model, groups, config.objective, proximal)
    expected_loss.backward()
    expected = gradients(model)
    assert expected.abs().max() > 1e-3

    micro_batches, statistics = set(), []
    for budget in (1 << 20, 60, 1):
        for packed in (False, True):
            cut = replace(config, budget_tokens=budget, packed=packed)
            stats, found = step(model, groups, cut, proximal=proximal)
            assert stats.loss == pytest.approx(expected_loss.item(), abs=1e-5)
            assert (found - expected).abs().max() < 1e-5
            micro_batches.add(stats.micro_batches)
            statistics.append(stats)
    assert min(micro_batches) == 1 and max(micro_batches) == sum(len(group.completions) for group in groups)
    for stats in statistics[1:]:
        for field in ("clip_fraction", "ratio_mean", "ratio_max", "entropy", "importance_weight_mean", "kl_behaviour"):
            assert getattr(stats, field) == pytest.approx(getattr(statistics[0], field), abs=1e-5)
        assert stats.tokens == statistics[0].tokens
    assert name == "reinforce" or statistics[0].clip_fraction > 0.01


def test_a_zero_advantage_group_contributes_nothing_and_is_never_computed() -> None:
    model = small_model()
    groups = ragged_groups(3)
    dull = replace(ragged_groups(1, seed=9)[0], advantages=[0.0] * len(ragged_groups(1, seed=9)[0].completions))
    calls: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda *_arguments: calls.append(1))
    without_stats, without = step(model, groups, UpdateConfig())
    with_stats, found = step(model, [groups[0], dull, *groups[1:]], UpdateConfig())
    hook.remove()
    assert torch.equal(found, without)
    assert with_stats == replace(without_stats, groups_left_out=1)
    assert len(calls) == 2

    model.zero_grad()
    stats = accumulate_gradients(model, [dull], UpdateConfig())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (stats.groups, stats.groups_left_out, stats.tokens, stats.loss) == (0, 1, 0, 0.0)


def test_zero_advantage_groups_may_count_in_the_mean_without_being_computed() -> None:
    model = small_model()
    groups = ragged_groups(3)
    dull = replace(groups[0], advantages=[0.0] * len(groups[0].completions))
    config = UpdateConfig(objective=configured("dapo"), count_uninformative=True)
    _, alone = step(model, groups, config)
    stats, diluted = step(model, [*groups, dull], config)
    tokens, extra = (sum(sum(group.completion_lengths) for group in part) for part in (groups, [dull]))
    assert stats.tokens == tokens
    torch.testing.assert_close(diluted, alone * tokens / (tokens + extra), atol=1e-7, rtol=1e-5)


def test_answers_that_a_likelihood_filter_drops_count_in_no_mean_even_in_groups_without_advantage() -> None:
    model = small_model().double()
    groups = ragged_groups(3, with_behaviour=False)
    near = replace(groups[0], advantages=[0.0] * len(groups[0].completions))
    far = replace(near, behaviour_logprobs=[[-40.0] * length for length in near.completion_lengths])
    config = UpdateConfig(
        objective=configured("grpo"), importance=ImportanceConfig(sequence_bounds=(0.5, 2.0)), count_uninformative=True
    )

    def found(extra: list[TokenGroup]) -> torch.Tensor:
        whole = [*groups, *extra]
        return step(model, whole, config, proximal=batch_logprobs(model, whole, config, counted=True))[1]

    sequences, dull = (sum(len(group.completions) for group in part) for part in (groups, [near]))
    torch.testing.assert_close(found([far]), found([]))
    torch.testing.assert_close(found([near]), found([]) * sequences / (sequences + dull), atol=3e-7, rtol=1e-5)


def test_a_zero_advantage_group_is_computed_when_it_holds_the_policy_to_a_reference() -> None:
    model, reference_model = small_model(), small_model(hidden_size=16)
    dull = replace(ragged_groups(1)[0], advantages=[0.0] * len(ragged_groups(1)[0].completions))
    config = UpdateConfig(objective=configured(kl_coefficient=0.1))
    stats, found = step(model, [dull], config, reference=batch_logprobs(reference_model, [dull], config))
    assert stats.groups == 1 and stats.kl_reference > 0.01
    assert found.abs().max() > 1e-4


def test_a_group_of_weight_zero_is_left_out() -> None:
    model = small_model()
    groups = ragged_groups(3)
    _, expected = step(model, groups[:2], UpdateConfig())
    stats, found = step(model, [*groups[:2], replace(groups[2], weight=0.0)], UpdateConfig())
    assert torch.equal(found, expected) and stats.groups_left_out == 1


def test_the_first_update_of_a_batch_is_on_policy_and_later_ones_clip() -> None:
    model = small_model()
    groups = ragged_groups(5, with_behaviour=False)
    config = UpdateConfig(objective=configured("dapo"), budget_tokens=80)
    proximal = batch_logprobs(model, groups, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        seen.append(accumulate_gradients(model, groups, config, proximal=proximal))
        optimizer.step()
    assert seen[0].ratio_mean == pytest.approx(1.0, abs=1e-5) and seen[0].clip_fraction == 0.0
    assert seen[1].ratio_max > 1.01
    assert seen[3].clip_fraction > 0.05
    assert seen[3].loss < seen[0].loss


def test_without_proximal_logprobs_the_policy_is_its_own_proximal_policy() -> None:
    model = small_model()
    groups = ragged_groups(3)
    _, given = step(model, groups, UpdateConfig(), proximal=batch_logprobs(model, groups, UpdateConfig()))
    stats, implied = step(model, groups, UpdateConfig())
    assert (stats.ratio_mean, stats.ratio_max) == (1.0, 1.0)
    torch.testing.assert_close(implied, given, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("broken", [-math.inf, math.nan, math.inf])
def test_tokens_without_a_finite_behaviour_logprob_leave_the_loss_and_the_count(name: str, broken: float) -> None:
    """In float64: a group whose every token is dropped changes nothing at all, and one such token
    is as if it were not there.
    """
    model = small_model(dtype=torch.float64)
    groups = [group for group in ragged_groups(5) if group.behaviour_logprobs[0] is not None]
    config = UpdateConfig(objective=OBJECTIVES[name])
    hopeless = replace(groups[0], behaviour_logprobs=[[broken] * length for length in groups[0].completion_lengths])
    stats, found = step(model, [*groups[1:], hopeless], config)
    _, expected = step(model, groups[1:], config)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-12)
    dropped = sum(hopeless.completion_lengths)
    tokens = dropped + sum(length for group in groups[1:] for length in group.completion_lengths)
    assert stats.dropped_fraction == pytest.approx(dropped / tokens)
    assert stats.behaviour_fraction == pytest.approx(1 - dropped / tokens)
    counts = step_normaliser([*groups[1:], hopeless], config)
    assert counts == step_normaliser(groups[1:], config)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_sequences_that_the_mask_drops_leave_the_loss_and_the_count(name: str) -> None:
    model = small_model(dtype=torch.float64)
    group = ragged_groups(1)[0]
    importance = ImportanceConfig(sequence_bounds=(0.5, 2.0))
    config = UpdateConfig(objective=OBJECTIVES[name], importance=importance)
    proximal = batch_logprobs(model, [group], config)
    own = proximal[0]
    behaviour = [logprobs.tolist() for logprobs in own]
    behaviour[0] = (own[0] - 2.0).tolist()
    stats, found = step(model, [replace(group, behaviour_logprobs=behaviour)], config, proximal=proximal)
    rest = replace(group, completions=group.completions[1:], behaviour_logprobs=behaviour[1:], advantages=group.advantages[1:])
    _, expected = step(model, [rest], config, proximal=[proximal[0][1:]])
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-12)
    lengths = group.completion_lengths
    assert stats.dropped_fraction == pytest.approx(lengths[0] / sum(lengths))
    assert stats.truncated_fraction == pytest.approx(lengths[0] / sum(lengths))


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_group_s_share_scales_its_loss_and_its_place_in_the_divisor(name: str) -> None:
    model = small_model(dtype=torch.float64)
    groups = ragged_groups(4)
    config = UpdateConfig(objective=OBJECTIVES[name])
    parts = [step(model, [group], config, normaliser=Normaliser(1, 1.0))[1] for group in groups]
    _, found = step(model, [*groups[:3], replace(groups[3], share=0.25)], config)
    lengths = [group.completion_lengths for group in groups]
    if config.objective.aggregated_by == "token_mean":
        expected = (parts[0] + parts[1] + parts[2] + 0.25 * parts[3]) / (sum(map(sum, lengths[:3])) + 0.25 * sum(lengths[3]))
    else:
        last = 1.0 if config.objective.aggregated_by == "sequence_mean" else 0.25
        expected = (parts[0] + parts[1] + parts[2] + last * parts[3]) / sum(map(len, lengths))
    # Rows of another width go through other kernels, and positions are embedded in float32.
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_two_processes_that_share_a_normaliser_add_up_to_one() -> None:
    model = small_model()
    groups = ragged_groups(6)
    for objective in OBJECTIVES.values():
        config = UpdateConfig(objective=objective)
        _, whole = step(model, groups, config)
        counts = step_normaliser(groups[:2], config) + step_normaliser(groups[2:], config)
        assert counts == Normaliser.count([length for group in groups for length in group.completion_lengths])
        parts = [step(model, part, config, normaliser=counts)[1] for part in (groups[:2], groups[2:])]
        torch.testing.assert_close(parts[0] + parts[1], whole, atol=1e-6, rtol=1e-4)


def test_gradient_checkpointing_changes_nothing() -> None:
    model = small_model().train()
    groups = ragged_groups(3)
    config = UpdateConfig(packed=True)
    _, expected = step(model, groups, config)
    model.gradient_checkpointing_enable()
    stats, found = step(model, groups, config)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert stats.entropy > 0


def test_bfloat16_autocast_keeps_float32_gradients_close_to_exact_ones() -> None:
    model = small_model()
    groups = ragged_groups(4)
    _, exact = step(model, groups, UpdateConfig(packed=True))
    stats, found = step(model, groups, UpdateConfig(packed=True, autocast_bf16=True))
    assert found.dtype == torch.float32 and not torch.equal(found, exact)
    assert torch.nn.functional.cosine_similarity(found, exact, dim=0) > 0.98
    assert math.isfinite(stats.loss)


def test_the_same_step_gives_the_same_bits() -> None:
    groups = ragged_groups(5)
    model = small_model()
    twin = copy.deepcopy(model)
    config = UpdateConfig(packed=True, budget_tokens=70)
    assert torch.equal(step(model, groups, config)[1], step(twin, groups, config)[1])


def test_policy_gradient_steps_make_the_rewarded_completion_likelier() -> None:
    model = small_model()
    group = TokenGroup(
        prompt_ids=[1, 2, 3],
        completions=[[4, 5, 0], [6, 0], [7, 8, 9, 0]],
        behaviour_logprobs=[None] * 3,
        advantages=[1.0, -0.5, -0.5],
    )
    for objective in OBJECTIVES.values():
        learner = copy.deepcopy(model)
        config = UpdateConfig(objective=objective, packed=True)
        before = [logprobs.sum() for logprobs in batch_logprobs(learner, [group], config)[0]]
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            accumulate_gradients(learner, [group], config)
            optimizer.step()
        after = [logprobs.sum() for logprobs in batch_logprobs(learner, [group], config)[0]]
        assert after[0] > before[0] + 0.01, objective.name
        assert after[0] - after[1] > before[0] - before[1]
