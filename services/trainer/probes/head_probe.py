"""Tests on the model itself whether its output layer may be computed separately from the rest, in
chunks.
"""

from __future__ import annotations

from dataclasses import replace

import structlog
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from services.trainer.gradient.chunked_head import CHUNK_BYTES, LogitTransform
from services.trainer.gradient.forward import SeparateHead, completion_logprobs, output_layer, text_config
from services.trainer.gradient.micro_batches import plan_rows
from services.trainer.gradient.modes import evaluating
from services.trainer.gradient.rows import TokenGroup, build_rows

# Tolerance of each value, relative to 1 + |value|. A half-precision product may be rounded
# differently for another number of rows.
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_HALF_PRODUCT_TOLERANCE = 0.05
_LARGE_LOGIT = 60.0
"""The probe raises the largest logit to this value, so that effects on large logits, such as a soft
cap at 30, are detected.
"""


class NotSeparate(Exception):
    """Why logits are not computed in chunks."""


def separate_head(model: nn.Module, budget_tokens: int) -> SeparateHead | None:
    """How to compute the model's logits in chunks. None, with a line in the log, if that is not
    certain to give the same result.

    budget_tokens: of one forward pass; if their logits fit into one chunk there is nothing to gain
    (None, without a line). All processes of a sharded model must make the same call. The model's
    mode is restored.
    """
    if budget_tokens * int(getattr(text_config(model), "vocab_size", 0)) * 4 <= CHUNK_BYTES:
        return None
    try:
        with evaluating(model):
            return probed(model)
    except (NotSeparate, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as reason:
        structlog.get_logger("trainer").warning(
            "logits_not_chunked",
            reason=str(reason),
            consequence="all logits of a forward pass are kept in memory at once: lower trainer.token_budget if they do not fit",
        )
        return None


@torch.no_grad()
def probed(model: nn.Module) -> SeparateHead:
    """The model's separate head, tested on a few tokens. Raises NotSeparate, or the model's own
    error if it cannot be tested.
    """
    head = output_layer(model)
    if type(head) is not nn.Linear:
        raise NotSeparate(f"the output layer is a {type(head).__name__}, not a plain linear layer")
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or "forward" in vars(head):
        raise NotSeparate("a hook is registered on the output layer")
    config = text_config(model)
    softcap = getattr(config, "final_logit_softcapping", None)
    transform = LogitTransform(
        multiplier=float(getattr(config, "logit_scale", None) or 1.0),
        divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        softcap=None if softcap is None else float(softcap),
    )
    tokens = torch.randint(int(config.vocab_size), (12,), generator=torch.Generator().manual_seed(0)).tolist()  # type: ignore[attr-defined]
    largest = max(_compared(model, head, tokens, transform, 1.0), 1e-6)
    _compared(model, head, tokens, transform, _LARGE_LOGIT / largest)
    separate = SeparateHead(transform=transform, always=isinstance(head.weight, DTensor))
    group = TokenGroup(prompt_ids=tokens[:4], completions=[tokens[4:]], behaviour_logprobs=[None], advantages=[0.0])
    rows = build_rows([group], plan_rows([group], shared_prompt=False, budget_tokens=99, hidden_size=1))
    rows = rows.to(next(model.parameters()).device)
    at_once = completion_logprobs(model, rows).logprobs
    chunked = completion_logprobs(model, rows, separate_head=replace(separate, always=True)).logprobs
    _same(chunked, at_once, head.weight.dtype, "logprobs")
    return separate


def _compared(model: nn.Module, head: nn.Linear, tokens: list[int], transform: LogitTransform, factor: float) -> float:
    """Compares the model's logits with those computed from the head's input and `transform`.
    Returns the head's largest product.

    factor: multiplies the head's input, so that its products are that much larger than the model's
    usual ones.
    """
    products: list[Tensor] = []

    def enlarge(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0] * factor, *arguments[1:])

    def compute(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        # Inside this block the weights of a sharded model are gathered.
        products.append(functional.linear(arguments[0], module.weight, module.bias))
        _same(output, products[-1], output.dtype, "output layer's products")

    hooks = [head.register_forward_pre_hook(enlarge), head.register_forward_hook(compute)]
    try:
        inputs = torch.tensor([tokens], device=next(model.parameters()).device)
        logits = model(input_ids=inputs, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(products) != 1:
        raise NotSeparate(f"the output layer is called {len(products)} times in a forward pass")
    largest = float(products[0].abs().max())
    _same(logits, transform.apply_(products[0].clone()), products[0].dtype, "logits")
    return largest


def _same(found: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    if found.shape != expected.shape:
        raise NotSeparate(f"{what} have shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    difference = (found - expected).abs() / (1.0 + expected.abs())
    if not bool((difference <= _TOLERANCE.get(dtype, _HALF_PRODUCT_TOLERANCE)).all()):
        raise NotSeparate(f"the model's {what} are not those of its output layer, by up to {float(difference.max()):.1e}")
