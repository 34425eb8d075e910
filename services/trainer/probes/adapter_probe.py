"""Tests on the model itself which adapters can learn, because some models read a layer's weight
past its adapter or never call the layer.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from services.trainer.gradient.forward import completion_logprobs, text_config
from services.trainer.gradient.micro_batches import plan_rows
from services.trainer.gradient.modes import evaluating
from services.trainer.gradient.rows import TokenGroup, build_rows
from shared.model.weights import plain_name

_TOKENS = 48
_SECOND_FACTOR = re.compile(r"\.lora_(embedding_)?B\.")


def adapters_without_gradient(model: nn.Module) -> list[str]:
    """Names of adapted layers that no gradient from a few tokens reaches. Numbers in the names are
    left out, because there may be many.

    An expert that no token was routed to is not reported if another expert of its layer learns.
    Clears gradients. All processes of a sharded model must make the same call.
    """
    reached: dict[str, bool] = {}
    with evaluating(model), torch.enable_grad():
        _logprobs(model).sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if match := _SECOND_FACTOR.search(name):
            layer = _one_of_its_experts(plain_name(name[: match.start()]))
            reached[layer] = _is_any(parameter.grad) or reached.get(layer, False)
    model.zero_grad(set_to_none=True)
    return sorted({re.sub(r"\b\d+\b", "*", layer) for layer, learns in reached.items() if not learns})


def _logprobs(model: nn.Module) -> Tensor:
    vocabulary = int(getattr(text_config(model), "vocab_size", 0))
    tokens = torch.randint(vocabulary, (_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    group = TokenGroup(prompt_ids=tokens[:4], completions=[tokens[4:]], behaviour_logprobs=[None], advantages=[0.0])
    rows = build_rows([group], plan_rows([group], shared_prompt=False, budget_tokens=_TOKENS, hidden_size=1))
    return completion_logprobs(model, rows.to(next(model.parameters()).device)).logprobs


def _one_of_its_experts(layer: str) -> str:
    """The name with all numbers after the first, which is the layer's, replaced by a
    placeholder.
    """
    head, number, rest = re.match(r"(.*?)(\b\d+\b|$)(.*)", layer).groups()  # type: ignore[union-attr]
    return f"{head}{number}" + re.sub(r"\b\d+\b", "*", rest)


def _is_any(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return bool(whole.any())
