"""m2po, gepo, vespo and oapl against loops in NumPy, by hand, and as steps of a model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.gradient.rows import TextLogprob
from services.trainer.gradient.update import UpdateConfig, accumulate_gradients, batch_logprobs, step_normaliser, with_masks
from services.trainer.objectives.advantages import AdvantageConfig, batch_advantages
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.gepo import gepo_log_expectation
from services.trainer.objectives.token_loss import Normaliser, token_loss, token_weights
from tests.objectives import configured
from tests.unit.trainer_models import gradients, ragged_groups, small_model

LENGTHS = [3, 5, 1, 4, 2, 6]
GROUP_OF = [0, 0, 0, 1, 1, 1]


def numbers(seed: int) -> list[dict[str, np.ndarray]]:
    """Sequences of two groups of three: policy, behaviour and advantage."""
    rng = np.random.default_rng(seed)
    found = []
    for length in LENGTHS:
        policy = -rng.exponential(1.0, length)
        found.append({"policy": policy, "behaviour": policy + rng.normal(0.05, 0.15, length), "advantage": rng.normal()})
    return found


def numpy_loss(config: ConfiguredObjective, sequences: list[dict[str, np.ndarray]]) -> float:
    """Straight from the formulas, one sequence after the other."""
    loss, tokens = 0.0, sum(LENGTHS)
    for number, each in enumerate(sequences):
        policy, behaviour, advantage = each["policy"], each["behaviour"], float(each["advantage"])
        if config.name == "gepo":
            q = [math.exp(other["behaviour"].mean()) for g, other in zip(GROUP_OF, sequences, strict=True) if g == GROUP_OF[number]]
            weight = math.exp(policy.mean()) / (sum(value**2 for value in q) / sum(q))
            bounded = min(max(weight, 1 - config.settings.clip_low), 1 + config.settings.clip_high)
            loss += -min(weight * advantage, bounded * advantage) / len(sequences)
        elif config.name == "vespo":
            ratio = math.exp(sum(policy - behaviour))
            sign = "positive" if advantage >= 0 else "negative"
            k, rate = (config.settings.objective_options[f"{sign}_{name}"] for name in ("power", "rate"))
            loss += -(math.exp(rate) * ratio**k * math.exp(-rate * ratio)) * advantage * sum(policy) / tokens
        else:
            loss += (config.settings.objective_options["scale"] * sum(policy - behaviour) - advantage) ** 2 / len(sequences)
    return loss


def tensor_loss(config: ConfiguredObjective, sequences: list[dict[str, np.ndarray]], policy: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    behaviour = torch.full(mask.shape, math.nan, dtype=torch.float64)
    behaviour[mask] = torch.tensor(np.concatenate([each["behaviour"] for each in sequences]))
    group_values = [
        gepo_log_expectation([each["behaviour"].mean() for g, each in zip(GROUP_OF, sequences, strict=True) if g == group])
        for group in (0, 1)
    ]
    found = token_loss(
        config,
        logprobs=policy,
        proximal_logprobs=policy.detach(),
        advantages=torch.tensor([float(each["advantage"]) for each in sequences], dtype=torch.float64),
        mask=mask,
        behaviour_logprobs=behaviour,
        log_denominators=torch.tensor([group_values[group] for group in GROUP_OF], dtype=torch.float64),
    )
    return (token_weights(config, mask, Normaliser.count(LENGTHS)) * found.loss).sum()


OBJECTIVES = [
    configured("gepo", clip_low=0.1, clip_high=0.1),
    configured("vespo"),
    configured(
        "vespo", objective_options={"positive_power": 1.5, "positive_rate": 1.0, "negative_power": 0.5, "negative_rate": 4.0}
    ),
    configured("oapl", objective_options={"scale": 0.5}),
]


@pytest.mark.parametrize("config", OBJECTIVES, ids=lambda config: config.name)
def test_loss_and_gradient_equal_a_loops(config: ConfiguredObjective) -> None:
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    for seed in range(4):
        sequences = numbers(seed)
        policy = torch.full(mask.shape, math.nan, dtype=torch.float64)
        policy[mask] = torch.tensor(np.concatenate([each["policy"] for each in sequences]))
        policy.requires_grad_()
        loss = tensor_loss(config, sequences, policy)
        assert loss.item() == pytest.approx(numpy_loss(config, sequences), rel=1e-9)
        loss.backward()
        assert policy.grad is not None
        for row, (each, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
            if config.name == "vespo":  # Its weight is held constant, so that differences of the loss are no gradient of it.
                ratio = math.exp(sum(each["policy"] - each["behaviour"]))
                sign = "positive" if each["advantage"] >= 0 else "negative"
                k, rate = (config.settings.objective_options[f"{sign}_{name}"] for name in ("power", "rate"))
                slope = -math.exp(rate - rate * ratio) * ratio**k * float(each["advantage"]) / sum(LENGTHS)
                expected = [slope] * length
            else:
                expected = [central_difference(config, sequences, row, t) for t in range(length)]
            assert policy.grad[row, :length].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8), (seed, row)


def central_difference(config: ConfiguredObjective, sequences: list[dict[str, np.ndarray]], row: int, token: int) -> float:
    found = []
    for step in (1e-6, -1e-6):
        moved = [{**each, "policy": each["policy"].copy()} for each in sequences]
        moved[row]["policy"][token] += step
        found.append(numpy_loss(config, moved))
    return (found[0] - found[1]) / 2e-6


def test_the_soft_value_is_the_one_worked_out_by_hand_and_0_without_spread() -> None:
    (found, flat) = batch_advantages([[1.0, 0.0], [0.5, 0.5]], AdvantageConfig(kind="soft_value", value_beta=1.0))
    value = math.log((math.e + 1.0) / 2.0)
    assert found == pytest.approx([1.0 - value, -value]) and flat == [0.0, 0.0]
    # A small temperature makes the value that of the best answer; large rewards do not overflow.
    assert batch_advantages([[1e4, 0.0]], AdvantageConfig(kind="soft_value", value_beta=0.1))[0] == pytest.approx(
        [0.1 * math.log(2), -1e4 + 0.1 * math.log(2)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m2po", "gepo", "vespo", "oapl"])
def test_a_steps_gradient_does_not_depend_on_how_it_is_cut(name: str) -> None:
    groups = [replace(group, text_logprobs=_texts(len(group.completions))) for group in ragged_groups(5)]
    options, found = {"threshold": 0.3} if name == "m2po" else {}, []
    for budget in (24, 1 << 20):
        model = small_model(dtype=torch.float64)
        config = UpdateConfig(objective=configured(name, objective_options=options), budget_tokens=budget)  # type: ignore[arg-type]
        proximal = batch_logprobs(model, groups, config)
        stats = accumulate_gradients(model, with_masks(groups, config, proximal), config, proximal=proximal)
        found.append(gradients(model))
        assert (stats.micro_batches == 1) == (budget > 24) and found[-1].norm() > 1e-6
    assert (found[0] - found[1]).norm() <= 1e-10 * found[1].norm()


def _texts(count: int) -> list[TextLogprob | None]:
    return [TextLogprob(-3.0 * (number + 1), number + 1) if number % 2 else None for number in range(count)]


def test_m2_masks_tokens_over_the_whole_update_and_they_count_in_the_mean() -> None:
    model = small_model(dtype=torch.float64)
    groups = ragged_groups(4)
    config = UpdateConfig(objective=configured("m2po", objective_options={"threshold": 0.3}))
    logprobs = batch_logprobs(model, groups, config)
    masked = with_masks(groups, config, logprobs)
    tokens = sum(length for group in groups for length in group.completion_lengths)
    count, constrained = 0, []
    for group, after, group_values in zip(groups, masked, logprobs, strict=True):
        assert after.behaviour_logprobs == group.behaviour_logprobs
        for known, marks, own, advantage in zip(
            group.behaviour_logprobs, after.masked, group_values, group.advantages, strict=True
        ):
            for b, mark, p in zip(own if known is None else known, marks, own, strict=True):
                count += bool(mark)
                if (float(p) - float(b)) * advantage > 0 and not mark:
                    constrained.append((float(p) - float(b)) ** 2)
    assert 0 < count < tokens and sum(constrained) / len(constrained) <= 0.3
    stats = accumulate_gradients(model, masked, config, proximal=logprobs)
    assert stats.clip_fraction * stats.tokens == pytest.approx(count) and stats.dropped_fraction == 0.0
    assert step_normaliser(masked, config, logprobs).tokens == tokens
