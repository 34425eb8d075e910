"""A model of half precision computes in float32 for a while, and is then as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shared.model.full_precision import computing_in_float32
from tests.architectures.tiny import tiny_model

IDS = torch.arange(3, 23)[None]


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "mamba"])
def test_it_computes_what_a_float32_model_with_the_same_weights_computes(kind: str) -> None:
    model = tiny_model(kind).bfloat16()
    exact = copy.deepcopy(model).float()
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    rounded = logits(model)
    with computing_in_float32(model):
        torch.testing.assert_close(logits(model), logits(exact), atol=1e-6, rtol=0)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert torch.equal(logits(model), rounded)


def test_only_one_layer_is_copied_at_a_time() -> None:
    model = tiny_model("llama").bfloat16()
    most: list[int] = []

    def count(*_: object) -> None:
        most.append(sum(any(weight.dtype == torch.float32 for weight in layer.parameters()) for layer in model.model.layers))

    with computing_in_float32(model):
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(count)
        logits(model)
    assert most == [1, 1]


def test_after_a_pass_that_failed_the_weights_are_its_own() -> None:
    model = tiny_model("llama").bfloat16()

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), computing_in_float32(model):
        model.model.layers[1].mlp.register_forward_hook(fail)
        logits(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
