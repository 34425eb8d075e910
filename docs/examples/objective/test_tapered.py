"""`pytest test_tapered.py`, in the environment that the example is installed in."""

from __future__ import annotations

import torch
from swarm_example_objective import OBJECTIVE, centred

from services.trainer.objectives.base import LossTerms
from shared.config.trainer_section import ObjectiveSection


def terms(logprobs: torch.Tensor, proximal: torch.Tensor, advantage: float) -> LossTerms:
    present = torch.ones_like(proximal, dtype=torch.bool)
    return LossTerms(
        settings=ObjectiveSection(objective_options={"floor": 0.1}),
        logprobs=logprobs,
        proximal=proximal,
        log_ratio=logprobs - proximal,
        advantage=torch.tensor([[advantage]]),
        mask=present,
        present=present,
    )


def test_where_the_ratio_is_one_the_gradient_is_that_of_plain_reinforce() -> None:
    for advantage in (1.5, -1.5):
        logprobs = torch.tensor([[-0.5, -2.0]], requires_grad=True)
        OBJECTIVE.loss(terms(logprobs, logprobs.detach(), advantage)).loss.sum().backward()
        assert logprobs.grad is not None and logprobs.grad.tolist() == [[-advantage, -advantage]]


def test_what_became_unlikely_is_pushed_down_less_but_never_not_at_all() -> None:
    logprobs = torch.tensor([[-1.0, -9.0]], requires_grad=True)
    OBJECTIVE.loss(terms(logprobs, torch.tensor([[-0.5, -0.5]]), -1.0)).loss.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.6065, 0.1]]), atol=1e-4, rtol=0.0)


def test_a_weight_outside_floor_and_one_is_told_as_clamped_and_only_of_bad_answers() -> None:
    logprobs, proximal = torch.tensor([[-1.0, -9.0, -0.1]]), torch.tensor([[-0.5, -0.5, -0.5]])
    assert OBJECTIVE.loss(terms(logprobs, proximal, -1.0)).clipped.tolist() == [[False, True, True]]
    assert OBJECTIVE.loss(terms(logprobs, proximal, 1.0)).clipped.tolist() == [[False, False, False]]


def test_advantages_sum_to_nothing() -> None:
    assert centred([1.0, 0.0, 0.5]) == [0.5, -0.5, 0.0]
