"""The policy that learns is the policy that sampled: without dropout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from services.trainer.gradient.forward import completion_logprobs, evaluating, set_training_modes, silence
from services.trainer.gradient.rows import build_rows, plan_rows
from services.trainer.gradient.update import UpdateConfig, accumulate_gradients
from services.trainer.policy_model import UntrainableModel, check_trainable
from tests.architectures.tiny import tiny_model
from tests.unit.trainer_models import gradients, ragged_groups, small_model

DROPOUT = {
    "biogpt": {"hidden_dropout_prob": 0.3, "activation_dropout": 0.3, "layerdrop": 0.3},
    "gpt_bigcode": {"attn_pdrop": 0.3, "resid_pdrop": 0.3},
    "opt": {"dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.3},
    "phimoe": {"input_jitter_noise": 0.3},
    "seed_oss": {"residual_dropout": 0.3, "attention_dropout": 0.3},
    "starcoder2": {"residual_dropout": 0.3},
    "xglm": {"dropout": 0.3, "activation_dropout": 0.3, "layerdrop": 0.3},
}
"""Models that drop in functional calls, skip layers or shake their router, at rates that no chance
hides.
"""


def rows_of(model: nn.Module) -> torch.Tensor:
    groups = ragged_groups(3)
    return completion_logprobs(model, build_rows(groups, plan_rows(groups, packed=False, budget_tokens=999), packed=False)).logprobs


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", DROPOUT)
def test_a_model_that_drops_trains_as_it_samples(kind: str, checkpointing: bool) -> None:
    model = tiny_model(kind, **DROPOUT[kind])
    expected = rows_of(model).detach()
    model.train()
    torch.manual_seed(0)
    assert (rows_of(model) - expected).abs().max() > 1e-2, "these rates do nothing: the test has no power"
    silence(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    set_training_modes(model)
    check_trainable(model)
    for _ in range(3):
        torch.testing.assert_close(rows_of(model), expected, atol=1e-5, rtol=0)


def test_a_model_that_still_drops_is_refused() -> None:
    model = tiny_model("opt", dropout=0.3)
    model.train()
    with pytest.raises(UntrainableModel, match="opt.*keeps dropout or noise on"):
        check_trainable(model)


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    with pytest.raises(UntrainableModel, match="bert.*not a causal language model"):
        check_trainable(tiny_model("bert", is_decoder=False))


def test_a_model_that_sees_later_tokens_but_not_padding_is_refused() -> None:
    with pytest.raises(UntrainableModel, match="xlm.*not a causal language model"):
        check_trainable(tiny_model("xlm"))


@pytest.mark.parametrize("kind", ["cpmant", "xlm"])
def test_half_precision_does_not_hide_that_a_model_sees_later_tokens(kind: str) -> None:
    with pytest.raises(UntrainableModel, match="not a causal language model"):
        check_trainable(tiny_model(kind).bfloat16())


def test_a_model_that_sees_later_tokens_only_in_texts_past_its_window_is_refused() -> None:
    check_trainable(tiny_model("doge", keep_window_size=1000))
    with pytest.raises(UntrainableModel, match="doge.*not a causal language model"):
        check_trainable(tiny_model("doge", keep_window_size=64))


def test_layers_that_save_memory_are_computed_twice() -> None:
    model = small_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    set_training_modes(model)
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    accumulate_gradients(model, ragged_groups(1), UpdateConfig())
    assert len(calls) == 2
    assert gradients(model).norm() > 0


def test_after_an_evaluation_every_module_is_in_its_mode() -> None:
    model = small_model()
    model.gradient_checkpointing_enable()
    set_training_modes(model)
    before = {name: module.training for name, module in model.named_modules()}
    assert set(before.values()) == {True, False}
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert {name: module.training for name, module in model.named_modules()} == before
