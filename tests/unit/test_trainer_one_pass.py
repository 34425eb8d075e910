"""A step passes every text through the model once: the same pass gives the gradient, the check of
foreign answers, the bound of each foreign group, and the proximal policy of later updates.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.step_positions import COMPLETIONS, Shape, config_for, positions, sharing_batch
from services.trainer.gradient.bounded_step import InfluenceRules, bounded_gradients
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import FirstPass, UpdateConfig, accumulate_gradients, batch_logprobs
from services.trainer.learner import Learner
from tests.integration.trainer_life import through_a_file, tiny_policy
from tests.objectives import configured
from tests.unit.trainer_models import ragged_groups, small_model

FACTOR, LONGEST = 1.2, 12


def logprobs_alone(model: nn.Module, group: TokenGroup, completion: int) -> Tensor:
    answer = torch.tensor(list(group.completions[completion]))
    ids = torch.cat([torch.tensor(list(group.prompt_ids)), answer])
    logits = model(ids.unsqueeze(0)).logits[0, len(group.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, answer.unsqueeze(-1)).squeeze(-1)


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([each.flatten() for each in found if each is not None])


def expected_gradient(
    model: nn.Module, groups: list[TokenGroup], least: float, aggregation: str
) -> tuple[Tensor, dict[int, float], dict[int, list[int]]]:
    """The step's gradient, scales of foreign groups and the answers kept; one text at a time."""
    kept = {
        number: [
            place
            for place in range(len(group.completions))
            if group.is_local or float(logprobs_alone(model, group, place).detach().mean()) >= least
        ]
        for number, group in enumerate(groups)
    }
    lengths = [len(groups[number].completions[place]) for number, places in kept.items() for place in places]
    size = {"token_mean": sum(lengths), "sequence_mean": len(lengths), "fixed_length": len(lengths) * LONGEST}[aggregation]

    def of_group(number: int) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for place in kept[number]:
            each = -groups[number].advantages[place] * logprobs_alone(model, groups[number], place)
            loss = loss + (each.mean() if aggregation == "sequence_mean" else each.sum()) / size
        return gradient_of(model, loss)

    local = [number for number, group in enumerate(groups) if group.is_local]
    total = torch.stack([of_group(number) for number in local]).sum(dim=0)
    usual = float(total.norm()) / math.sqrt(len(local))
    scales = {}
    for number, group in enumerate(groups):
        if not group.is_local and kept[number]:
            gradient = of_group(number)
            if (norm := float(gradient.norm())) > FACTOR * usual:
                scales[number] = usual / norm
            total = total + scales.get(number, 1.0) * gradient
    return total, scales, {number: kept[number] for number, group in enumerate(groups) if not group.is_local}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("packed", [False, True])
def test_one_pass_gives_the_gradient_of_an_independent_computation(aggregation: Any, packed: bool) -> None:
    model = small_model(dtype=torch.float64)
    groups = ragged_groups(8, with_behaviour=False)
    groups[5] = replace(groups[5], advantages=[30.0 * each for each in groups[5].advantages])
    foreign = [(group, place) for group in groups if not group.is_local for place in range(len(group.completions))]
    means = sorted(float(logprobs_alone(model, group, place).detach().mean()) for group, place in foreign)
    least = (means[len(means) // 3] + means[len(means) // 3 - 1]) / 2
    expected, scales, kept = expected_gradient(model, groups, least, aggregation)
    assert scales and any(len(places) < len(groups[number].completions) for number, places in kept.items())

    objective = configured("dapo", aggregation=aggregation, max_completion_tokens=LONGEST)
    config = UpdateConfig(objective=objective, budget_tokens=40, packed=packed)
    first = FirstPass((number for number, group in enumerate(groups) if not group.is_local), least)
    found = bounded_gradients(model, groups, config, InfluenceRules(factor=FACTOR), first=first)
    gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    assert first.kept == kept
    assert found.scales == pytest.approx(scales, rel=1e-6)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-6
    assert found.stats.tokens == sum(
        len(groups[number].completions[place])
        for number in range(8)
        for place in kept.get(number, range(len(groups[number].completions)))
    )
    places = {(number, place) for number, group in enumerate(first.groups) for place in range(len(group.completions))}
    assert places == set(found.uses) and all(found.uses[place].kept for place in places if found.scales.get(place[0], 1.0))


PROMPT, ANSWER = 6, 20
LOCAL, FOREIGN = COMPLETIONS * (ANSWER - 1), COMPLETIONS // 2 * (ANSWER - 1)
"""Tokens of a local group's answers without their ends, and of a foreign group's, of which the
right ones are trained on.
"""


@pytest.mark.parametrize(
    ("shape", "without", "within"),
    [
        # Short answers of the candidates that take a place are looked at first: are they mastered?
        (Shape("six of eighteen", 2, 18, keep=6), 6 * FOREIGN, 2 * LOCAL + 6 * FOREIGN),
        (Shape("uniform", 2, 6), 0, 2 * LOCAL + 6 * FOREIGN),
        (Shape("no local group", 0, 6), 0, 6 * FOREIGN),
        (Shape("two updates", 2, 6, trainer={"updates_per_batch": 2}), 0, 2 * (2 * LOCAL + 6 * FOREIGN)),
        (Shape("local", 4, 0), 0, 4 * LOCAL),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else "",
)
def test_no_text_is_computed_twice_under_the_same_weights(tmp_path: Path, shape: Shape, without: int, within: int) -> None:
    learner = Learner(config_for(tiny_policy(tmp_path / "tiny"), tmp_path, shape, ANSWER))
    counts, record = positions(learner, sharing_batch(learner, shape, 1, PROMPT, ANSWER))
    assert record.updated and record.groups_bounded == 0
    assert counts["answer tokens without gradient"] == without
    assert counts["answer tokens with gradient"] == within


class WeightCasts(TorchDispatchMode):
    """Counts how often each of a model's weights is cast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {each.data_ptr(): name for name, each in model.named_parameters()}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.counts.update([self._names[pointer]] if (pointer := args[0].data_ptr()) in self._names else [])
        return func(*args, **(kwargs or {}))


def test_with_autocast_a_weight_is_cast_once_a_step_and_the_gradient_is_that_of_the_sum_of_its_passes() -> None:
    model = small_model()
    config = UpdateConfig(budget_tokens=40, autocast_bf16=True)
    groups = ragged_groups(4)
    accumulate_gradients(model, groups, config)
    expected = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    model.zero_grad(set_to_none=True)
    with WeightCasts(model) as casts:
        found = bounded_gradients(model, groups, config, InfluenceRules())
    assert found.stats.micro_batches >= 4 and casts.counts and set(casts.counts.values()) == {1}
    gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    assert float((gradient - expected).norm() / expected.norm()) < 2e-2


def test_a_restored_learner_bounds_foreign_groups_by_the_local_groups_of_before(tmp_path: Path) -> None:
    """Bit for bit; without what it remembers it ends elsewhere."""
    shape = Shape("", 2, 2, trainer={"constants": {"foreign_norm_factor": 0.2, "adam_eps": 1e-3}})
    config = config_for(tiny_policy(tmp_path / "tiny"), tmp_path, shape, ANSWER)
    whole, second, forgetful = (Learner(config) for _ in range(3))
    both, foreign = (
        sharing_batch(whole, each, number, PROMPT, ANSWER) for number, each in enumerate((shape, replace(shape, local=0)), 1)
    )
    assert whole.step(both).groups_bounded == 2
    state = through_a_file(whole.state(), tmp_path / "saved")
    second.restore(state)
    forgetful.restore(replace(state, recent_norms=[]))
    assert [learner.step(foreign).groups_bounded for learner in (whole, second, forgetful)] == [2, 2, 1]
    left, right, other = (learner.policy() for learner in (whole, second, forgetful))
    assert all(torch.equal(value, right[name]) for name, value in left.items())
    assert not all(torch.equal(value, other[name]) for name, value in left.items())


def test_of_equal_answers_of_a_group_one_is_scored() -> None:
    model, config = small_model(), UpdateConfig()
    (group,) = ragged_groups(1, completions=(4, 4))
    alike = replace(group, completions=[group.completions[place] for place in (0, 1, 0, 0)], behaviour_logprobs=[None] * 4)
    plain, rows = model.forward, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal rows
        rows += len(named["input_ids"])
        return plain(*arguments, **named)

    model.forward = counted
    [found] = batch_logprobs(model, [alike], config)
    model.forward = plain
    assert rows == 2 and len(found) == 4
    for place, logprobs in enumerate(found):
        torch.testing.assert_close(logprobs, logprobs_alone(model, alike, place).detach(), atol=1e-5, rtol=0)
