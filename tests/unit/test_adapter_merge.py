"""Adapters merged in float32 and rounded once, and the figure that says what the rounding loses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from services.trainer.policy_model import adapters_without_gradient, with_adapters
from shared.config.trainer_section import LoraSection
from shared.model.weights import DeltaRounding, RoundingTally, plain_name, policy_tensors
from tests.architectures.tiny import tiny_model
from tests.unit.trainer_models import small_model

FAMILIES = pytest.mark.parametrize("family", ["qwen2", "llama"])
TIES = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
TARGETS = pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj"], ["v_proj", "down_proj"]], ids=["all-linear", "q_proj", "v_and_down"]
)


def adapted_model(
    family: str = "qwen2",
    *,
    tied: bool = True,
    targets: Any = "all-linear",
    scale: float = 1e-2,
    dtype: torch.dtype = torch.bfloat16,
    adapters_in_float32: bool = True,
) -> Any:
    """A small model whose adapters add about `scale` times 0.3 to weights of about 0.2."""
    model = small_model(family, dtype=dtype, tie_word_embeddings=tied)
    adapted = get_peft_model(
        model,
        LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"),
        autocast_adapter_dtype=adapters_in_float32,
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, scale)
    return adapted


def by_hand(adapted: Any, scaling: float = 2.0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Base and delta of every adapted weight, in float32, from the factors themselves."""
    state = adapted.state_dict()
    found = {}
    for name, a in state.items():
        if name.endswith("lora_A.default.weight"):
            stem = name.removesuffix("lora_A.default.weight")
            b = state[f"{stem}lora_B.default.weight"]
            found[plain_name(f"{stem}base_layer.weight")] = (
                state[f"{stem}base_layer.weight"].float(),
                b.float() @ a.float() * scaling,
            )
    return found


def rounding_of(adapted: Any, dtype: torch.dtype | None) -> DeltaRounding | None:
    tally = RoundingTally()
    policy_tensors(adapted, dtype, tally=tally)
    return tally.rounding()


@pytest.mark.slow
@FAMILIES
@TIES
@TARGETS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once(family: str, tied: bool, targets: Any, dtype: torch.dtype) -> None:
    adapted = adapted_model(family, tied=tied, targets=targets)
    tensors, expected = policy_tensors(adapted, dtype), by_hand(adapted)
    assert expected and all(torch.equal(tensors[name], (base + delta).to(dtype)) for name, (base, delta) in expected.items())
    plain = policy_tensors(small_model(family, dtype=torch.bfloat16, tie_word_embeddings=tied), dtype)
    assert tensors.keys() == plain.keys() and ("lm_head.weight" in tensors) == (not tied)
    assert all(torch.equal(tensors[name], plain[name]) for name in tensors.keys() - expected.keys())


def test_adapters_in_half_precision_and_an_autocast_around_it_change_nothing_in_the_merge() -> None:
    adapted = adapted_model(adapters_in_float32=False)
    assert {parameter.dtype for parameter in adapted.parameters()} == {torch.bfloat16}
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    expected = by_hand(adapted)
    tensors = policy_tensors(adapted, torch.float32)
    assert all(torch.equal(tensors[name], base + delta) for name, (base, delta) in expected.items())
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, before[name]) for name, value in adapted.state_dict().items())

    adapted = adapted_model()
    with torch.autocast("cpu", torch.bfloat16):
        tensors = policy_tensors(adapted, torch.float32)
    assert all(torch.equal(tensors[name], base + delta) for name, (base, delta) in by_hand(adapted).items())


@pytest.mark.slow
@FAMILIES
@TIES
@TARGETS
@pytest.mark.parametrize("scale", [3e-4, 3e-3, 3e-2], ids=["tiny", "small", "large"])
def test_the_loss_is_what_numpy_finds_in_the_published_weights(family: str, tied: bool, targets: Any, scale: float) -> None:
    adapted = adapted_model(family, tied=tied, targets=targets, scale=scale)
    tally = RoundingTally()
    tensors = policy_tensors(adapted, torch.bfloat16, tally=tally)
    base = np.concatenate([base.double().numpy().ravel() for base, _ in by_hand(adapted).values()])
    delta = np.concatenate([delta.double().numpy().ravel() for _, delta in by_hand(adapted).values()])
    published = np.concatenate([tensors[name].double().numpy().ravel() for name in by_hand(adapted)])
    kept = published - base
    found = tally.rounding()
    assert found is not None
    assert found.lost_ratio == pytest.approx(1 - (kept @ delta) / (delta @ delta), abs=1e-5)
    assert found.unmoved_ratio == pytest.approx(np.mean(kept[delta != 0] == 0), abs=1e-6)


def test_a_small_delta_is_lost_in_bfloat16_a_large_one_is_not_and_float32_keeps_both() -> None:
    def lost(scale: float, dtype: torch.dtype) -> float:
        rounding = rounding_of(adapted_model(scale=scale), dtype)
        assert rounding is not None
        return rounding.lost_ratio

    assert lost(3e-5, torch.bfloat16) > 0.9
    assert abs(lost(1e-1, torch.bfloat16)) < 0.01
    assert abs(lost(3e-5, torch.float32)) < 1e-3 and abs(lost(1e-1, torch.float32)) < 1e-5


def test_a_published_policy_that_is_rounded_again_when_it_is_loaded_has_lost_as_much_as_one_published_rounded() -> None:
    adapted = adapted_model(scale=1e-3)
    exact, rounded = policy_tensors(adapted, torch.float32), policy_tensors(adapted, torch.bfloat16)
    assert all(torch.equal(exact[name].to(torch.bfloat16), rounded[name]) for name in exact)


def test_without_a_delta_there_is_no_figure() -> None:
    assert rounding_of(adapted_model(scale=0.0), torch.bfloat16) is None
    assert rounding_of(small_model(dtype=torch.bfloat16), torch.bfloat16) is None


def test_the_trainer_s_adapters_are_float32_on_a_base_in_half_precision() -> None:
    adapted = with_adapters(small_model(dtype=torch.bfloat16), LoraSection(rank=2))
    assert {parameter.dtype for parameter in adapted.parameters() if parameter.requires_grad} == {torch.float32}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapting_a_tied_weight_is_refused_because_a_merged_policy_cannot_hold_it(target: str) -> None:
    lora = LoraSection(rank=2, target_modules=["q_proj", target])
    with pytest.raises(ValueError, match=f"trainer.lora.target_modules adapts .*{target}.weight.*name other modules"):
        with_adapters(small_model(tie_word_embeddings=True), lora)
    adapted = with_adapters(small_model(tie_word_embeddings=False), lora)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    base, merged = policy_tensors(small_model(tie_word_embeddings=False)), policy_tensors(adapted)
    assert any(target in name and not torch.equal(value, base[name]) for name, value in merged.items())


@pytest.mark.parametrize(("kind", "module"), [("llama4_text", "router"), ("phimoe", "router"), ("deepseek_v4", "o_a_proj")])
def test_adapters_on_what_only_calls_itself_a_linear_layer_are_refused_by_name(kind: str, module: str) -> None:
    with pytest.raises(ValueError, match=rf"target_modules adapts model\.layers\.\d\.\w+\.{module}, a \w+ that computes something"):
        with_adapters(tiny_model(kind), LoraSection(rank=2, target_modules=[module]))


def test_a_linear_layer_in_a_class_of_its_own_takes_adapters() -> None:
    assert with_adapters(tiny_model("falcon"), LoraSection(rank=2)).peft_config


def test_adapters_that_the_model_passes_by_are_named() -> None:
    model = with_adapters(tiny_model("jamba"), LoraSection(rank=2))
    assert adapters_without_gradient(model) == ["model.layers.*.mamba.dt_proj"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert adapters_without_gradient(with_adapters(small_model(), LoraSection(rank=2))) == []


def test_adapters_on_fused_experts_are_refused_before_training_and_those_on_named_layers_are_merged() -> None:
    with pytest.raises(ValueError, match=r"adapts model\.layers\.\d\.mlp.*fused experts.*name linear layers"):
        with_adapters(tiny_model("qwen3_moe"), LoraSection(rank=2))
    adapted = with_adapters(tiny_model("qwen3_moe"), LoraSection(rank=2, target_modules=["q_proj", "o_proj"]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    expected, tensors = by_hand(adapted, scaling=8.0), policy_tensors(adapted)
    assert len(expected) == 4 and all(torch.equal(tensors[name], base + delta) for name, (base, delta) in expected.items())
