"""Logprobs and entropy of completion tokens under a causal LM, over plain or shared-prompt rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.trainer.rows import TokenRows, block_causal_mask


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """logprobs: (N, T), with gradient. entropy: (N, T) in nats, without. Both 0 on padding.

    float32, or float64 where the model is. Both are those of the policy at the temperature asked for.
    """

    logprobs: Tensor
    entropy: Tensor


def completion_logprobs(model: nn.Module, rows: TokenRows, *, temperature: float = 1.0) -> CompletionLogprobs:
    """Runs `model` once over `rows` (on its device) and scores every completion token at `temperature`.

    The output layer sees only the positions that predict a completion token: never the prompt, never padding.
    Raises ValueError when the temperature is not positive, or when rows are shared and the attention cannot.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}: behaviour logprobs need one that is more than 0")
    wanted = rows.predicted_from[rows.mask]
    logits = _at_least_float32(_logits_at(model, rows, wanted)) / temperature
    log_partition = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, rows.targets[rows.mask].unsqueeze(-1)).squeeze(-1) - log_partition
    with torch.no_grad():
        log_probabilities = logits.detach() - log_partition.detach().unsqueeze(-1)
        # A token that a model rules out has logit -inf, and 0 x -inf is NaN; its share of the entropy is 0.
        entropy = -(log_probabilities.exp() * log_probabilities.clamp(min=torch.finfo(logits.dtype).min)).sum(-1)
    empty = torch.zeros(rows.mask.shape, dtype=logits.dtype, device=logits.device)
    return CompletionLogprobs(
        logprobs=empty.masked_scatter(rows.mask, logprobs),
        entropy=empty.masked_scatter(rows.mask, entropy),
    )


def text_config(model: nn.Module) -> object:
    """The configuration of the model's language part; wrappers such as LoRA's are looked through."""
    return model.config.get_text_config()  # type: ignore[operator, union-attr]


def attention_implementation(model: nn.Module) -> str:
    """The attention that transformers chose for the model, such as `sdpa`, `eager` or `flash_attention_2`."""
    return str(getattr(text_config(model), "_attn_implementation", "unknown"))


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _logits_at(model: nn.Module, rows: TokenRows, positions: Tensor) -> Tensor:
    """(M, vocabulary) logits at M flattened positions, through the model's own forward and output layer."""
    inputs: dict[str, Tensor] = {"input_ids": rows.input_ids}
    if rows.shared:
        inputs["attention_mask"] = _attention_mask(model, block_causal_mask(rows.segment_ids))
        inputs["position_ids"] = rows.position_ids
    # Plain rows go without a mask: padding stands to the right, where causal attention never looks, and attention
    # kernels are fastest when they need no mask.
    with _output_layer_at(model, positions):
        logits: Tensor = model(**inputs, use_cache=False).logits
    if logits.shape[:2] == (1, len(positions)):
        return logits[0]
    return logits.flatten(0, 1)[positions]


def _attention_mask(model: nn.Module, allowed: Tensor) -> Tensor:
    implementation = attention_implementation(model)
    if implementation == "sdpa":
        return allowed
    if implementation == "eager":
        # Eager attention adds the mask to the scores.
        dtype = next(model.parameters()).dtype
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
    raise ValueError(
        f"attention {implementation!r} takes no mask of one's own, so completions cannot share a row: "
        "use sdpa, or plan rows with shared_prompt=False"
    )


@contextmanager
def _output_layer_at(model: nn.Module, positions: Tensor) -> Iterator[None]:
    """Narrows what the output layer sees from (R, W, hidden) to (1, M, hidden), the flattened `positions`.

    The model's own forward stays in charge, so what it does to logits (scaling, soft caps) and what wraps it (LoRA,
    FSDP) still happens.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        yield
        return

    def narrow(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = arguments[0]
        return (hidden.flatten(0, 1)[positions].unsqueeze(0), *arguments[1:])

    hook = head.register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        hook.remove()
