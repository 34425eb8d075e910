"""Importance weights: truncated, clamped, and one where the behaviour policy is not known."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.gradient.importance import ImportanceConfig, importance_weights

MASK = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
# Weights of sequence 0: 0.5, 4, 1; sequence 1: 3, 3; sequence 2 has no behaviour logprobs.
RATIOS = torch.tensor([[0.5, 4.0, 1.0], [3.0, 3.0, 9.0], [8.0, 8.0, 8.0]], dtype=torch.float64)
PROXIMAL = torch.full((3, 3), -2.0, dtype=torch.float64)
KNOWN = torch.tensor([True, True, False])


def weigh(config: ImportanceConfig, behaviour: torch.Tensor | None = None):
    return importance_weights(
        config,
        proximal_logprobs=PROXIMAL.clone().requires_grad_(),
        behaviour_logprobs=PROXIMAL - RATIOS.log() if behaviour is None else behaviour,
        has_behaviour=KNOWN,
        mask=MASK,
    )


def test_a_tokens_weight_is_proximal_over_behaviour_truncated_at_the_cap() -> None:
    found = weigh(ImportanceConfig(cap=2.0))
    assert found.weights[0].tolist() == pytest.approx([0.5, 2.0, 1.0])
    assert found.weights[1].tolist() == pytest.approx([2.0, 2.0, 0.0])
    assert found.truncated.tolist() == [[False, True, False], [True, True, False], [False, False, False]]
    assert not found.weights.requires_grad


def test_without_a_cap_weights_are_left_alone() -> None:
    found = weigh(ImportanceConfig(cap=None))
    assert found.weights[0].tolist() == pytest.approx([0.5, 4.0, 1.0])
    assert not found.truncated.any()


def test_a_sequence_from_another_tokenizer_has_weight_one() -> None:
    found = weigh(ImportanceConfig(sequence_bounds=(0.9, 1.1)))
    assert found.weights[2].tolist() == [1.0, 1.0, 1.0]
    assert found.keep[2].all() and not found.known[2].any()


def test_the_sequence_mask_drops_what_leaves_the_geometric_bounds() -> None:
    # geometric means: (0.5 x 4 x 1)^(1/3) = 1.26 stays within 2.0; 3 does not. The cap does not
    # hide it.
    found = weigh(ImportanceConfig(sequence_bounds=(0.5, 2.0)))
    assert found.keep.tolist() == [[True] * 3, [False] * 3, [True] * 3]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_token_whose_behaviour_logprob_is_not_finite_is_dropped(broken: float) -> None:
    behaviour = PROXIMAL - RATIOS.log()
    behaviour[0, 1] = broken
    found = weigh(ImportanceConfig(sequence_bounds=(0.5, 4.0)), behaviour)
    assert found.keep.tolist() == [[True, False, True], [True, True, False], [True] * 3]
    assert torch.isfinite(found.weights).all() and torch.isfinite(found.behaviour_kl).all()


def test_the_divergence_to_behaviour_is_k3_over_known_tokens() -> None:
    found = weigh(ImportanceConfig())
    # w - 1 - ln w for w = 0.5, 4, 1
    expected = [0.5 - 1 - math.log(0.5), 4 - 1 - math.log(4), 0.0]
    assert found.behaviour_kl[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert found.behaviour_kl[2].tolist() == [0.0, 0.0, 0.0]


def test_log_weights_are_clamped() -> None:
    found = weigh(ImportanceConfig(cap=None), torch.full((3, 3), -1e30, dtype=torch.float64))
    assert found.weights[0, 0] == pytest.approx(math.exp(20.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"cap": 0.0},
        {"sequence_bounds": (1.2, 2.0)},
        {"sequence_bounds": (0.5, 0.9)},
    ],
)
def test_impossible_importance_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ImportanceConfig(**wrong)
