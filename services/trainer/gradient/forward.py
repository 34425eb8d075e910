"""Logprobs and entropy of completion tokens under a causal LM, over plain or shared-prompt rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from services.trainer.gradient.chunked_head import CHUNK_BYTES, LogitTransform, chunked_logprobs
from services.trainer.gradient.rows import TokenRows, block_causal_mask
from shared.model.full_precision import is_half

_MASK_ALIGNMENT = 16
"""Memory-efficient attention on a GPU copies a mask, in every layer, whose rows do not start at
multiples of so many numbers.
"""


@dataclass(frozen=True, slots=True)
class CompletionLogprobs:
    """logprobs: (N, T), with gradient. entropy: (N, T) in nats, without. Both 0 on padding.

    float32, or float64 if the model is. Both are those of the policy at the requested temperature.
    """

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateHead:
    """States that a model's logits are `transform` of its output layer's product, so that they need
    not be in memory all at once.

    Determined by `services.trainer.probes.head_probe`. chunk_bytes: size of the logits in memory at
    once. always: also use chunks if all logits fit into one; processes that share a sharded output
    layer must do so, because each has another number of tokens.
    """

    transform: LogitTransform = LogitTransform()
    chunk_bytes: int = CHUNK_BYTES
    always: bool = False

    def is_used(self, head: nn.Module, tokens: int) -> bool:
        """Whether the logits of this many tokens are computed in chunks."""
        assert isinstance(head.weight, Tensor)
        return self.always or tokens * len(head.weight) * 4 > self.chunk_bytes


def completion_logprobs(
    model: nn.Module, rows: TokenRows, *, temperature: float = 1.0, separate_head: SeparateHead | None = None
) -> CompletionLogprobs:
    """Run `model` once over `rows` (on its device) and score every completion token at
    `temperature`.

    The output layer sees only the positions that predict a completion token: never the prompt,
    never padding. separate_head: how to compute logits in chunks; None: all at once, through the
    model's own forward pass. Raises ValueError if the temperature is not positive, or if rows are
    shared and the attention does not support that.
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
    """The module that computes logits from hidden states, or None if the model does not declare it;
    wrappers such as LoRA's are unwrapped.
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
        # If a model excludes a token its logit is -inf, and 0 x -inf is NaN; the token's share of
        # the entropy is 0.
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
    """Like `_at_once`, from the hidden states before the output layer."""
    taken: list[Tensor] = []

    def take(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        taken.append(arguments[0].flatten(0, 1)[positions])
        # The model's own logits are not used; computing them for one position is enough for its
        # forward pass.
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
    """A sharded parameter, gathered. Its gradient is the sum over all processes, each of which
    keeps its shard.
    """
    if isinstance(parameter, DTensor):
        return parameter.full_tensor(grad_placements=[Partial()])
    assert isinstance(parameter, Tensor)
    return parameter


class _Through(torch.autograd.Function):
    """Returns its first argument; the second gets a gradient of 0. FSDP2 gathers a module's weights
    for the backward pass when the module's output gets a gradient, and hidden states alone are not
    its output.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0])


def _logits_at(model: nn.Module, rows: TokenRows, positions: Tensor) -> Tensor:
    """(M, vocabulary) logits at M flattened positions, through the model's own forward pass and
    output layer.

    The output layer sees (1, M, hidden) instead of (R, W, hidden). Because the model's own forward
    pass is used, whatever it does to logits (scaling, soft caps) and whatever wraps it (LoRA, FSDP)
    still applies.
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
    # Plain rows need no mask: padding is on the right, where causal attention never looks, and
    # attention kernels are fastest without a mask.
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def _attention_mask(model: nn.Module, allowed: Tensor) -> Tensor:
    implementation = attention_implementation(model)
    if implementation == "sdpa":
        dtype = _scores_dtype(model, allowed.device.type)
        # From booleans every layer would make a mask of numbers and keep it for the backward pass.
        return allowed if dtype is None else _to_add(allowed, dtype, -math.inf)
    if implementation == "eager":
        dtype = next(model.parameters()).dtype
        return _to_add(allowed, dtype, torch.finfo(dtype).min)
    raise ValueError(
        f"attention {implementation!r} does not accept a custom mask, so completions cannot share a row: "
        "use sdpa, or plan rows with shared_prompt=False"
    )


def _scores_dtype(model: nn.Module, device: str) -> torch.dtype | None:
    """The dtype that sdpa computes in, which a mask of numbers must have; None if it is not
    certain.
    """
    if device not in ("cpu", "cuda"):
        return None
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype = next(model.parameters()).dtype
    # A half model may be computing in float32 (`computing_in_float32`).
    return None if is_half(dtype) else dtype


def _to_add(allowed: Tensor, dtype: torch.dtype, forbidden: float) -> Tensor:
    """A mask that is added to attention's scores: 0 where `allowed`, else `forbidden`."""
    *outer, width = allowed.shape
    padded = torch.zeros(*outer, -(-width // _MASK_ALIGNMENT) * _MASK_ALIGNMENT, dtype=dtype, device=allowed.device)
    return padded[..., :width].masked_fill_(~allowed, forbidden)


@contextmanager
def _before(module: nn.Module, hook: Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Iterator[None]:
    """Inside the block, `hook` changes the arguments of the module's calls."""
    registered = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        registered.remove()
