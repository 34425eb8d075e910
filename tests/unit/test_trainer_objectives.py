"""Golden values: every expected number is worked out in the test, from ratios chosen to be
round.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.token_loss import Normaliser, token_loss, token_weights
from tests.objectives import configured, step_loss

# Two sequences, of 3 and 1 tokens. Ratios to the proximal policy: 1.5, 1.0, 0.5 with A = 2; 3.0
# with A = -1.
LOGPROBS = [[-1.0, -2.0, -3.0], [-0.5, 99.0, math.nan]]
RATIOS = [[1.5, 1.0, 0.5], [3.0, 1.0, 1.0]]
ADVANTAGES = [2.0, -1.0]
MASK = torch.tensor([[True, True, True], [True, False, False]])
COUNTS = Normaliser.count([3, 1])


def inputs(**overrides: object) -> dict[str, object]:
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    proximal = logprobs.detach() - torch.tensor(RATIOS, dtype=torch.float64).log()
    return {
        "logprobs": logprobs,
        "proximal_logprobs": proximal,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "mask": MASK,
        **overrides,
    }


def total(config: ConfiguredObjective, arguments: dict[str, object], counts: Normaliser = COUNTS) -> Tensor:
    return step_loss(config, token_loss(config, **arguments), MASK, counts)


def losses(config: ConfiguredObjective, **overrides: object) -> list[float]:
    return token_loss(config, **inputs(**overrides)).loss[MASK].tolist()


# r A: 3.0, 2.0, 1.0 and -3.0; clipped to [0.8, 1.28]: 2.56, 2.0, 1.6 and -1.28; the loss is minus
# the smaller.
CLIPPED = [-2.56, -2.0, -1.0, 3.0]


def test_the_clipped_surrogate_of_every_token_is_the_one_worked_out_by_hand() -> None:
    assert losses(configured("grpo", clip_high=0.28)) == pytest.approx(CLIPPED, abs=1e-12)


def test_grpo_is_the_mean_of_sequence_means() -> None:
    # ((-2.56 - 2 - 1) / 3 + 3 / 1) / 2
    assert total(configured("grpo", clip_high=0.28), inputs()).item() == pytest.approx((-5.56 / 3 + 3.0) / 2, abs=1e-12)


def test_dr_grpo_divides_by_sequences_times_a_constant_length() -> None:
    config = configured("dr_grpo", max_completion_tokens=10, clip_high=0.28)
    # (-5.56 + 3) / (2 x 10)
    assert total(config, inputs()).item() == pytest.approx(-2.56 / 20, abs=1e-12)


def test_dapo_is_the_mean_over_all_tokens() -> None:
    assert total(configured("dapo"), inputs()).item() == pytest.approx(-2.56 / 4, abs=1e-12)


def test_gspo_uses_the_geometric_mean_ratio_of_the_sequence() -> None:
    # first sequence: (1.5 x 1 x 0.5)^(1/3) = 0.75^(1/3) = 0.9086, not clipped: -2 x 0.9086 for each
    # token second: 3.0, A < 0, the larger loss is not clipped: 3
    first = 0.75 ** (1 / 3)
    config = configured("gspo", clip_low=0.2, clip_high=0.28)
    assert losses(config) == pytest.approx([-2 * first] * 3 + [3.0], abs=1e-12)
    assert total(config, inputs()).item() == pytest.approx((-2 * first + 3.0) / 2, abs=1e-12)


def test_gspo_clips_the_whole_sequence() -> None:
    # with bounds 0.95 and 1.05 the first sequence's 0.9086 x 2 is smaller than 0.95 x 2, so it
    # stays; A = -2 clips it
    config = configured("gspo", clip_low=0.05, clip_high=0.05)
    advantages = torch.tensor([-2.0, -1.0], dtype=torch.float64)
    outcome = token_loss(config, **inputs(advantages=advantages))
    assert outcome.loss[0].tolist() == pytest.approx([2 * 0.95] * 3, abs=1e-12)
    assert outcome.clipped.tolist() == [[True, True, True], [False, False, False]]


def test_gspo_gradient_is_the_sequence_ratio_times_the_mean_of_token_gradients() -> None:
    arguments = inputs()
    total(configured("gspo", clip_low=0.2, clip_high=0.28), arguments).backward()
    # d/d lp of -A s / N, s = exp(mean log ratio), is -A s / (T N) for every token
    first = -2 * 0.75 ** (1 / 3) / 3 / 2
    assert arguments["logprobs"].grad[MASK].tolist() == pytest.approx([first] * 3 + [3.0 / 2], abs=1e-12)


def test_cispo_clamps_the_ratio_and_keeps_every_tokens_gradient() -> None:
    config = configured("cispo", objective_options={"min": 0.8, "max": 2.0})
    arguments = inputs()
    outcome = token_loss(config, **arguments)
    # -clamp(r) A lp: -1.5 x 2 x -1, -1 x 2 x -2, -0.8 x 2 x -3, -2 x -1 x -0.5
    assert outcome.loss[MASK].tolist() == pytest.approx([3.0, 4.0, 4.8, -1.0], abs=1e-12)
    assert outcome.clipped.tolist() == [[False, False, True], [True, False, False]]
    total(config, arguments).backward()
    # -clamp(r) A / 4 tokens
    assert arguments["logprobs"].grad[MASK].tolist() == pytest.approx([-0.75, -0.5, -0.4, 0.5], abs=1e-12)


@pytest.mark.parametrize("name", ["reinforce", "rloo"])
def test_reinforce_is_minus_advantage_times_logprob_of_whole_answers(name: str) -> None:
    # -2 x -1, -2 x -2, -2 x -3, 1 x -0.5; sum 11.5, over 2 answers
    assert losses(configured(name)) == pytest.approx([2.0, 4.0, 6.0, -0.5], abs=1e-12)
    assert total(configured(name), inputs()).item() == pytest.approx(11.5 / 2, abs=1e-12)


def test_an_objectives_aggregation_can_be_chosen() -> None:
    config = configured("reinforce", aggregation="sequence_mean")
    assert total(config, inputs()).item() == pytest.approx((12.0 / 3 - 0.5) / 2, abs=1e-12)


def test_the_gradient_of_a_clipped_token_is_zero() -> None:
    arguments = inputs()
    total(configured("dapo"), arguments).backward()
    # clipped 0; -A r / 4 = -2 / 4; -2 x 0.5 / 4 (A > 0, low side stays open); 3 / 4 (A < 0, high
    # side stays open)
    assert arguments["logprobs"].grad[MASK].tolist() == pytest.approx([0.0, -0.5, -0.25, 0.75], abs=1e-12)
    assert arguments["logprobs"].grad[~MASK].tolist() == [0.0, 0.0]


def test_the_clip_fraction_counts_tokens_whose_gradient_is_cut() -> None:
    clipped = token_loss(configured("grpo"), **inputs()).clipped
    assert clipped.tolist() == [[True, False, False], [False, False, False]]


def test_a_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    arguments = inputs()
    config = configured("dapo", dual_clip=2.0)
    outcome = token_loss(config, **arguments)
    # A = -1, r = 3: max(min(-3, -1.28), 2 x -1) = -2, so the loss is 2, its gradient 0; A > 0 is
    # untouched
    assert outcome.loss[MASK].tolist() == pytest.approx([-2.56, -2.0, -1.0, 2.0], abs=1e-12)
    assert outcome.clipped[1].tolist() == [True, False, False]
    total(config, arguments).backward()
    assert arguments["logprobs"].grad[1, 0] == 0.0


def test_the_divergence_to_the_reference_is_k3_and_counts_where_the_advantage_is_zero() -> None:
    # d = reference - policy = ln 2, so k3 = 2 - ln 2 - 1
    k3 = 1.0 - math.log(2.0)
    reference = torch.tensor(LOGPROBS, dtype=torch.float64) + math.log(2.0)
    config = configured("dapo", kl_coefficient=0.1)
    outcome = token_loss(config, **inputs(reference_logprobs=reference))
    assert outcome.loss[MASK].tolist() == pytest.approx(CLIPPED, abs=1e-12)
    assert outcome.reference_kl[MASK].tolist() == pytest.approx([k3] * 4, abs=1e-12)
    arguments = inputs(reference_logprobs=reference, advantages=torch.zeros(2, dtype=torch.float64))
    total(config, arguments).backward()
    # d k3 / d lp = 1 - exp(d) = -1
    assert arguments["logprobs"].grad[MASK].tolist() == pytest.approx([-0.1 / 4] * 4, abs=1e-12)


def test_a_divergence_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference logprobs"):
        token_loss(configured(kl_coefficient=0.1), **inputs())


def test_importance_weights_multiply_the_policys_loss_and_not_the_divergence() -> None:
    weights = torch.tensor([[0.5, 2.0, 1.0], [0.1, math.nan, 7.0]], dtype=torch.float64)
    reference = torch.tensor(LOGPROBS, dtype=torch.float64) + math.log(2.0)
    config = configured("dapo", kl_coefficient=1.0)
    outcome = token_loss(config, **inputs(importance_weights=weights, reference_logprobs=reference))
    assert outcome.loss[MASK].tolist() == pytest.approx([-1.28, -4.0, -1.0, 0.3], abs=1e-12)
    assert outcome.reference_kl[MASK].tolist() == pytest.approx([1.0 - math.log(2.0)] * 4, abs=1e-12)


def test_dropped_tokens_leave_the_loss_and_the_denominator() -> None:
    keep = torch.tensor([[True, False, True], [True, True, True]]) & MASK
    loss = token_loss(configured("dapo"), **inputs(keep=keep)).loss
    counts = Normaliser.count([2, 1])

    def aggregated(config: ConfiguredObjective) -> float:
        return (token_weights(config, keep, counts) * loss).sum().item()

    # -2.56 - 1 + 3 over 3 tokens that are left; (-3.56 / 2 + 3) / 2 with the first sequence 2 long
    assert aggregated(configured("dapo")) == pytest.approx(-0.56 / 3, abs=1e-12)
    assert aggregated(configured("grpo")) == pytest.approx((-3.56 / 2 + 3.0) / 2, abs=1e-12)
    fixed = configured("dr_grpo", max_completion_tokens=10)
    assert aggregated(fixed) == pytest.approx(-0.56 / 20, abs=1e-12)


def test_a_sequence_of_which_nothing_is_kept_counts_for_nothing() -> None:
    keep = torch.tensor([[False, False, False], [True, False, False]])
    loss = token_loss(configured("grpo"), **inputs(keep=keep)).loss
    counts = Normaliser.count([0, 1])
    assert (counts.sequences, counts.tokens) == (1, 1)
    for name in ("grpo", "dapo"):
        assert (token_weights(configured(name), keep, counts) * loss).sum().item() == pytest.approx(3.0, abs=1e-12)


def test_log_ratios_are_clamped_to_twenty() -> None:
    proximal = torch.full((2, 3), -500.0, dtype=torch.float64)
    outcome = token_loss(configured("dapo"), **inputs(proximal_logprobs=proximal))
    assert outcome.ratio[MASK].tolist() == pytest.approx([math.exp(20.0)] * 4)
    # A > 0 is clipped at 1.28, A < 0 loses exp(20)
    assert outcome.loss[MASK].tolist() == pytest.approx([-2.56] * 3 + [math.exp(20.0)])


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "reinforce"])
def test_values_on_padding_never_reach_loss_or_gradient(name: str) -> None:
    results = []
    for junk in (math.nan, math.inf, 0.0):
        logprobs = torch.tensor(LOGPROBS, dtype=torch.float64).masked_fill(~MASK, junk).requires_grad_()
        proximal = inputs()["proximal_logprobs"].masked_fill(~MASK, junk)
        arguments = inputs(logprobs=logprobs, proximal_logprobs=proximal)
        loss = total(configured(name), arguments)
        loss.backward()
        results.append((loss.item(), logprobs.grad.tolist()))
    assert results[0] == results[1] == results[2]
    assert all(math.isfinite(value) for row in results[0][1] for value in row)


def test_on_policy_the_clipped_surrogates_have_the_gradient_of_reinforce() -> None:
    found = []
    for name in ("dapo", "reinforce", "cispo"):
        arguments = inputs()
        arguments["proximal_logprobs"] = arguments["logprobs"].detach()
        total(configured(name), arguments).backward()
        found.append(arguments["logprobs"].grad[MASK].tolist())
    assert found[0] == pytest.approx([-0.5, -0.5, -0.5, 0.25], abs=1e-12)
    # reinforce divides by the 2 answers, the others by the 4 tokens
    assert found[1] == pytest.approx([2 * each for each in found[0]]) and found[2] == pytest.approx(found[0])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"objective": "ppo"}, "ppo"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.1}, "dual_clip"),
        ({"objective": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"objective": "cispo", "objective_options": {"min": 2.0, "max": 1.0}}, "min must be below max"),
        ({"kl_coefficient": -1.0}, "kl_coefficient"),
        ({"objective": "dr_grpo"}, "max_completion_tokens"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"objective": "m2po", "objective_options": {"threshold": 0.0}}, "objective_options.threshold"),
        ({"objective": "vespo", "objective_options": {"positive_power": 0.0}}, "objective_options.positive_power"),
        ({"objective": "m2po", "objective_options": {"scale": 1.0}}, "objective_options.scale"),
        ({"objective": "oapl", "objective_options": {"scale": 0.0}}, "objective_options.scale"),
    ],
)
def test_an_impossible_objective_is_refused_by_the_fields_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        configured(**wrong)
