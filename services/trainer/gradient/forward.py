"""Logprobs and entropy of completion tokens under a causal LM, over plain or shared-prompt rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from services.trainer.gradient.chunked_head import CHUNK_BYTES, LogitTransform, chunked_logprobs
from services.trainer.gradient.rows import TokenRows, block_causal_mask


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """logprobs: (N, T), with gradient. entropy: (N, T) in nats, without. Both 0 on padding.

    float32, or float64 where the model is. Both are those of the policy at the temperature asked
    for.
    """

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateHead:
    """Says that a model's logits are `transform` of its output layer's product, so that they need
    not be held all at once.

    Found out by `services.trainer.probes.head_probe`. chunk_bytes: of the logits held at once.
    always: also where all of them fit into one chunk, as processes that share a sharded output
    layer must, since each has another number of tokens.
    """

    transform: LogitTransform = LogitTransform()
    chunk_bytes: int = CHUNK_BYTES
    always: bool = False

    def is_used(self, head: nn.Module, tokens: int) -> bool:
        """Whether the logits of so many tokens are computed in chunks."""
        assert isinstance(head.weight, Tensor)
        return self.always or tokens * len(head.weight) * 4 > self.chunk_bytes


def completion_logprobs(
    model: nn.Module, rows: TokenRows, *, temperature: float = 1.0, separate_head: SeparateHead | None = None
) -> CompletionLogprobs:
    """Runs `model` once over `rows` (on its device) and scores every completion token at
    `temperature`.

    The output layer sees only the positions that predict a completion token: never the prompt,
    never padding. separate_head: how to compute logits in chunks; None: all at once, through the
    model's own forward. Raises ValueError when the temperature is not positive, or when rows are
    shared and the attention cannot.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}: behaviour logprobs need one above 0")
    positions, targets = rows.predicted_from[rows.mask], rows.targets[rows.mask]
    head = output_layer(model)
    if separate_head is not None and head is not None and separate_head.is_used(head, len(positions)):
        logprobs, entropy = _in_chunks(model, head, rows, positions, targets, temperature, separate_head)
    else:
        logprobs, entropy = _at_once(_logits_at(model, rows, positions), targets, temperature)
    empty = torch.zeros(rows.mask.shape, dtype=logprobs.dtype, device=logprobs.device)
    return CompletionLogprobs(
        logprobs=empty.masked_scatter(rows.mask, logprobs),
        entropy=empty.masked_scatter(rows.mask, entropy),
    )


def output_layer(model: nn.Module) -> nn.Module | None:
    """The module that computes logits from hidden states, or None if the model names none; wrappers
    such as LoRA's are unwrapped.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    return head


def text_config(model: nn.Module) -> object:
    """The configuration of the model's language part; wrappers such as LoRA's are unwrapped."""
    return model.config.get_text_config()  # type: ignore[operator, union-attr]


def attention_implementation(model: nn.Module) -> str:
    """The attention that transformers chose for the model, such as `sdpa`, `eager` or
    `flash_attention_2`.
    """
    return str(getattr(text_config(model), "_attn_implementation", "unknown"))


def _at_once(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies (M,) from (M, vocabulary) logits."""
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    log_partition = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_partition
    with torch.no_grad():
        log_probabilities = logits.detach() - log_partition.detach().unsqueeze(-1)
        # A token that a model rules out has logit -inf, and 0 x -inf is NaN; its share of the
        # entropy is 0.
        entropy = -(log_probabilities.exp() * log_probabilities.clamp(min=torch.finfo(logits.dtype).min)).sum(-1)
    return logprobs, entropy


def _in_chunks(
    model: nn.Module,
    head: nn.Module,
    rows: TokenRows,
    positions: Tensor,
    targets: Tensor,
    temperature: float,
    separate_head: SeparateHead,
) -> tuple[Tensor, Tensor]:
    """As `_at_once`, from the hidden states before the output layer."""
    taken: list[Tensor] = []

    def take(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        taken.append(arguments[0].flatten(0, 1)[positions])
        # The model's own logits are not used: one position keeps its forward going.
        return (arguments[0][:1, :1], *arguments[1:])

    with _before(head, take):
        logits = _forward(model, rows)
    sharded = isinstance(head.weight, DTensor)
    logprobs, entropy = chunked_logprobs(
        taken[0],
        _whole(head.weight),
        None if head.bias is None else _whole(head.bias),
        targets,
        temperature=temperature,
        transform=separate_head.transform,
        chunk_bytes=separate_head.chunk_bytes,
    )
    return (_Through.apply(logprobs, logits) if sharded else logprobs), entropy  # type: ignore[no-untyped-call]


def _whole(parameter: object) -> Tensor:
    """A sharded parameter, gathered; its gradient is the sum over all processes, each of which
    keeps its shard.
    """
    if isinstance(parameter, DTensor):
        return parameter.full_tensor(grad_placements=[Partial()])
    assert isinstance(parameter, Tensor)
    return parameter


class _Through(torch.autograd.Function):
    """The first argument; the second gets a gradient of 0, because FSDP2 brings a module's weights
    back for the backward pass when its output gets a gradient, and hidden states alone are no
    output."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0])


def _logits_at(model: nn.Module, rows: TokenRows, positions: Tensor) -> Tensor:
    """(M, vocabulary) logits at M flattened positions, through the model's own forward and output
    layer.

    The output layer sees (1, M, hidden) instead of (R, W, hidden). The model's own forward stays in
    charge, so what it does to logits (scaling, soft caps) and what wraps it (LoRA, FSDP) still
    happens.
    """

    def narrow(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0].flatten(0, 1)[positions].unsqueeze(0), *arguments[1:])

    head = output_layer(model)
    with _before(head, narrow) if head is not None else nullcontext():
        logits = _forward(model, rows)
    if logits.shape[:2] == (1, len(positions)):
        return logits[0]
    return logits.flatten(0, 1)[positions]


def _forward(model: nn.Module, rows: TokenRows) -> Tensor:
    inputs: dict[str, Tensor] = {"input_ids": rows.input_ids}
    if rows.shared:
        inputs["attention_mask"] = _attention_mask(model, block_causal_mask(rows.segment_ids))
        inputs["position_ids"] = rows.position_ids
    # Plain rows go without a mask: padding stands to the right, where causal attention never looks,
    # and attention kernels are fastest when they need no mask.
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def _attention_mask(model: nn.Module, allowed: Tensor) -> Tensor:
    implementation = attention_implementation(model)
    if implementation == "sdpa":
        return allowed
    if implementation == "eager":
        # Eager attention adds the mask to the scores.
        dtype = next(model.parameters()).dtype
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
    raise ValueError(
        f"attention {implementation!r} does not accept a custom mask, so completions cannot share a row: "
        "use sdpa, or plan rows with shared_prompt=False"
    )


@contextmanager
def _before(module: nn.Module, hook: Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Iterator[None]:
    """While inside, `hook` changes what the module is called with."""
    registered = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        registered.remove()
