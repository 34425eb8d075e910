"""What an environment says is read by the policy and never trained on: every objective gives the
loss and the gradient of an answer from which those tokens are gone.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.trainer.gradient.bounded_step import token_shares
from services.trainer.gradient.forward import CompletionLogprobs
from services.trainer.gradient.importance import ImportanceConfig
from services.trainer.gradient.rows import CompletionRows, TokenGroup, build_rows, plan_rows
from services.trainer.gradient.update import (
    KnownLogprobs,
    UpdateConfig,
    accumulate_gradients,
    batch_logprobs,
    scored_loss,
    step_normaliser,
    with_masks,
)
from services.trainer.selection.likelihood import local_means
from shared.registry import OBJECTIVES
from tests.objectives import configured
from tests.unit.trainer_models import VOCABULARY, small_model

TURNS = [[True] * 5 + [False] * 7 + [True] * 4, [True] * 3 + [False] * 2 + [True] * 2 + [False] * 3 + [True], [True] * 6]


def chance(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def groups_of_turns(count: int = 3, *, is_local: bool = True, known: bool = True) -> list[TokenGroup]:
    """Groups of answers with what an environment said between the turns; its tokens have no
    behaviour logprob.
    """
    groups = []
    for number in range(count):
        completions = [torch.randint(VOCABULARY, (len(turns),), generator=torch.Generator().manual_seed(number)) for turns in TURNS]
        noise = [(-3 * chance(len(turns), seed=10 * number + place)).tolist() for place, turns in enumerate(TURNS)]
        behaviour = [
            [value if said else math.nan for value, said in zip(values, turns, strict=True)]
            for values, turns in zip(noise, TURNS, strict=True)
        ]
        groups.append(
            TokenGroup(
                prompt_ids=[1, 2, 3 + number],
                completions=[each.tolist() for each in completions],
                behaviour_logprobs=behaviour if known else [None] * len(TURNS),
                advantages=[1.0, -0.7, 0.3],
                is_local=is_local,
                sampled=TURNS,
            )
        )
    return groups


def without_environment(group: TokenGroup) -> TokenGroup:
    def kept(values: list[float] | None, marks: list[bool]) -> list[float] | None:
        return None if values is None else [value for value, said in zip(values, marks, strict=True) if said]

    return replace(
        group,
        completions=[kept(tokens, marks) for tokens, marks in zip(group.completions, TURNS, strict=True)],
        behaviour_logprobs=[kept(values, marks) for values, marks in zip(group.behaviour_logprobs, TURNS, strict=True)],
        sampled=(),
    )


def loss_and_gradient(groups: list[TokenGroup], logprobs: list[list[Tensor]], config: UpdateConfig) -> tuple[Tensor, Tensor]:
    """The loss of a step from given logprobs, and its gradient by those of the policy's tokens, in
    their order.
    """
    groups = with_masks(groups, config, [[each.detach() for each in of_group] for of_group in logprobs])
    sequences = [(g, c) for g, group in enumerate(groups) for c in range(len(group.completions))]
    width = max(len(groups[g].completions[c]) for g, c in sequences)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, (g, c) in enumerate(sequences):
        length = len(groups[g].completions[c])
        mask[row, :length] = torch.tensor(groups[g].sampled_of(c) or [True] * length)
    leaf = torch.zeros(mask.shape, dtype=torch.float64)
    for row, (g, c) in enumerate(sequences):
        leaf[row, : len(logprobs[g][c])] = logprobs[g][c]
    leaf = leaf.masked_fill(~mask, 0.0).requires_grad_()
    proximal = [[each.detach() for each in of_group] for of_group in logprobs]
    scored = scored_loss(
        groups,
        CompletionRows(mask=mask, sequences=sequences),
        CompletionLogprobs(leaf, torch.zeros_like(leaf)),
        config,
        step_normaliser(groups, config, proximal),
        proximal,
        proximal if config.objective.needs_reference else None,
    )
    scored.loss.backward()
    assert leaf.grad is not None
    return scored.loss.detach(), leaf.grad[mask]


@pytest.mark.parametrize("known", [True, False], ids=["known", "encoded here"])
@pytest.mark.parametrize("objective", OBJECTIVES.built_in)
def test_an_objective_sees_only_what_the_policy_said(objective: str, known: bool) -> None:
    config = UpdateConfig(objective=configured(objective, max_completion_tokens=24))
    groups = groups_of_turns(known=known)
    logprobs = [[-3 * chance(len(turns), seed=100 + 10 * g + c) for c, turns in enumerate(TURNS)] for g in range(len(groups))]
    loss, gradient = loss_and_gradient(groups, logprobs, config)
    compact = [[each[torch.tensor(turns)] for each, turns in zip(of_group, TURNS, strict=True)] for of_group in logprobs]
    expected_loss, expected = loss_and_gradient([without_environment(group) for group in groups], compact, config)
    assert gradient.abs().max() > 0
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_packed_rows_give_the_gradient_of_rows_alone(objective: str) -> None:
    model = small_model(dtype=torch.float64)

    def gradient(packed: bool) -> tuple[Tensor, float]:
        model.zero_grad()
        config = UpdateConfig(objective=configured(objective), packed=packed)
        stats = accumulate_gradients(model, groups_of_turns(), config)
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]), stats.tokens

    (alone, tokens), (together, _) = gradient(False), gradient(True)
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)
    assert tokens == 3 * sum(map(sum, TURNS))


def test_what_an_environment_said_has_no_likelihood_and_costs_no_logits() -> None:
    model = small_model(dtype=torch.float64)
    (group,) = groups_of_turns(1)
    rows = build_rows([group], plan_rows([group], packed=False, budget_tokens=1000), packed=False)
    assert int(rows.mask.sum()) == sum(map(sum, TURNS))
    (masked,) = batch_logprobs(model, [group], UpdateConfig())
    (whole,) = batch_logprobs(model, [replace(group, sampled=())], UpdateConfig())
    for marks, found, alone in zip(TURNS, masked, whole, strict=True):
        said = torch.tensor(marks)
        torch.testing.assert_close(found[said], alone[said])
        assert found[~said].abs().sum() == 0


def test_logprobs_of_the_same_tokens_with_other_turns_are_computed_again() -> None:
    model = small_model(dtype=torch.float64)
    (group,) = groups_of_turns(1)
    known: KnownLogprobs = {}
    batch_logprobs(model, [group], UpdateConfig(), known=known)
    (whole,) = batch_logprobs(model, [replace(group, sampled=())], UpdateConfig(), known=known)
    assert all(bool((each < 0).all()) for each in whole)


def test_means_and_shares_count_the_policy_s_tokens() -> None:
    (group,) = groups_of_turns(1)
    expected = [math.fsum(filter(math.isfinite, values or ())) / sum(TURNS[n]) for n, values in enumerate(group.behaviour_logprobs)]
    assert local_means([group]) == pytest.approx(expected)
    foreign = replace(group, is_local=False)
    short = replace(without_environment(group), is_local=True)
    # As many tokens of the policy as the local group has: what the environment said does not count.
    assert token_shares([short, foreign], 1.0, [1.0, 1.0]) == [1.0, 1.0]


def test_the_normaliser_divides_by_the_policy_s_tokens() -> None:
    groups = groups_of_turns(known=False)
    for drops in (ImportanceConfig(), ImportanceConfig(sequence_bounds=(0.0, math.inf))):
        counts = step_normaliser(groups, UpdateConfig(objective=configured("dapo"), importance=drops))
        assert counts.tokens == 3 * sum(map(sum, TURNS))


@pytest.mark.parametrize("marks", [[True], [False] * 16])
def test_marks_that_do_not_fit_their_tokens_are_refused(marks: list[bool]) -> None:
    (group,) = groups_of_turns(1)
    with pytest.raises(ValueError, match="completion 0"):
        replace(group, sampled=[marks, *TURNS[1:]])
