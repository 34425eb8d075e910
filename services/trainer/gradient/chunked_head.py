"""Logprobs and entropy from hidden states, computed one chunk of logits at a time: the output
layer, softmax and their gradient.

A model's logits are by far the largest tensor of a step (16,384 tokens of a vocabulary of 151,936:
10 GB in float32), and automatic differentiation keeps several copies. Here the logits of one chunk
of tokens are computed, reduced to two numbers per token and discarded; the backward pass computes
them again. This needs memory for one chunk, small parts of it in float32, and the gradients
themselves. The result equals the unchunked computation except for the order of additions in the
weight's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 160 * 2**20
"""Size of one chunk of logits; on a GPU a chunk is twice as large. Logits that fit into this are
computed directly, which needs five times this memory: 0.84 GB. Chunks with what is computed from
them need less, on a GPU 0.67 GB.
"""

_PIECES = 16
_GPU_FACTOR, _GPU_PIECES = 2, 4
"""A GPU is done with a small piece before the next is launched."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model applies to its output layer's product: `softcap * tanh(x * multiplier / divisor
    / softcap)`; None: no soft cap.

    Gemma 2 caps (`final_logit_softcapping`), Cohere multiplies (`logit_scale`), Granite divides
    (`logits_scaling`).
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Apply it in place and in the logits' own dtype, as the models do."""
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope(self, transformed: Tensor) -> Tensor | float:
        """Derivative at the logit whose transformed value is given."""
        constant = self.multiplier / self.divisor
        if self.softcap is None:
            return constant
        return transformed.div(self.softcap).square_().neg_().add_(1.0).mul_(constant)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    transform: LogitTransform | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` with gradient, and entropies in nats without: both (M,), float32, or
    float64 if hidden is.

    hidden: (M, H). weight: (V, H). bias: (V,). targets: (M,) int64. Products are computed in
    autocast's dtype if it is on.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        found: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, temperature, transform or LogitTransform(), dtype, chunk_bytes
        )
    return found


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        transform: LogitTransform,
        dtype: torch.dtype,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        logprobs, entropy, log_partition = (torch.empty(count, dtype=exact, device=hidden.device) for _ in range(3))
        chunk_bytes, pieces = _sizes(hidden.device, chunk_bytes)
        for where, logits in _chunks(hidden, weight.to(dtype), bias, chunk_bytes):
            for piece, part in _pieces(logits, where, pieces):
                logprobs[part], entropy[part], log_partition[part] = _scores(piece, targets[part], temperature, transform, exact)
        ctx.save_for_backward(hidden, weight, bias, targets, log_partition)
        ctx.settings = temperature, transform, dtype, chunk_bytes, pieces
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_partition = ctx.saved_tensors
        temperature, transform, dtype, chunk_bytes, pieces = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        upstream = gradients[0]
        with torch.autocast(hidden.device.type, enabled=False):
            product = weight.to(dtype)
            hidden_grad = torch.empty_like(hidden, dtype=dtype) if wants_hidden else None
            weight_grad = torch.zeros_like(weight) if wants_weight else None
            bias_grad = torch.zeros_like(bias) if wants_bias else None
            for where, logits in _chunks(hidden, product, bias, chunk_bytes):
                for piece, part in _pieces(logits, where, pieces):
                    pull = upstream[part].unsqueeze(-1) / temperature
                    _replace_by_gradient(piece, targets[part], log_partition[part], pull, temperature, transform)
                if hidden_grad is not None:
                    torch.mm(logits, product, out=hidden_grad[where])
                if weight_grad is not None:
                    _add_outer(weight_grad, logits, hidden[where].to(dtype), pieces)
                if bias_grad is not None:
                    bias_grad += logits.sum(dim=0, dtype=log_partition.dtype).to(bias_grad.dtype)
        return None if hidden_grad is None else hidden_grad.to(hidden.dtype), weight_grad, bias_grad, None, None, None, None, None


def _scores(
    logits: Tensor, targets: Tensor, temperature: float, transform: LogitTransform, exact: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies and log partition functions (n,) in dtype `exact`, from the output
    layer's products (n, V), which are overwritten.
    """
    scaled = transform.apply_(logits).to(exact).div_(temperature)
    top = scaled.amax(dim=-1, keepdim=True)
    chosen = scaled.sub_(top).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    unnormalised = scaled.exp()
    total = unnormalised.sum(dim=-1)
    # If a model excludes a token its logit is -inf, and 0 x -inf is NaN; the token's share of the
    # entropy is 0.
    scaled.clamp_(min=torch.finfo(exact).min)
    mean = torch.bmm(unnormalised.unsqueeze(1), scaled.unsqueeze(2)).flatten() / total
    return chosen - total.log(), total.log() - mean, top.squeeze(-1) + total.log()


def _replace_by_gradient(
    logits: Tensor, targets: Tensor, log_partition: Tensor, pull: Tensor, temperature: float, transform: LogitTransform
) -> None:
    """Replace the output layer's products (n, V) by the loss's gradient with respect to them. pull:
    (n, 1), the gradient with respect to the logprobs, divided by the temperature.
    """
    scaled = transform.apply_(logits).to(log_partition.dtype)
    slope = transform.slope(scaled)
    by_logit = scaled.div_(temperature).sub_(log_partition.unsqueeze(-1)).exp_().mul_(-pull)
    chosen = targets.unsqueeze(-1)
    by_logit.scatter_(-1, chosen, by_logit.gather(-1, chosen) + pull)
    # Copies nothing if the work was done in place.
    logits.copy_(by_logit if isinstance(slope, float) and slope == 1.0 else by_logit.mul_(slope))


def _chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_bytes: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits (rows, V), all in one buffer, which the next chunk overwrites."""
    vocabulary = len(weight)
    rows = max(1, min(len(hidden), chunk_bytes // (vocabulary * weight.element_size())))
    buffer = torch.empty(rows, vocabulary, dtype=weight.dtype, device=weight.device)
    for start in range(0, len(hidden), rows):
        where = slice(start, min(start + rows, len(hidden)))
        logits = buffer[: where.stop - start]
        torch.mm(hidden[where].to(weight.dtype), weight.t(), out=logits)
        if bias is not None:
            logits.add_(bias.to(weight.dtype))
        yield where, logits


def _sizes(device: torch.device, chunk_bytes: int) -> tuple[int, int]:
    """Bytes of a chunk, and the number of its pieces."""
    return (chunk_bytes * _GPU_FACTOR, _GPU_PIECES) if device.type == "cuda" else (chunk_bytes, _PIECES)


def _pieces(logits: Tensor, where: slice, count: int) -> Iterator[tuple[Tensor, slice]]:
    """Parts of a chunk with the rows they belong to, so that temporary results stay small compared
    with the chunk.
    """
    rows = -(-len(logits) // count)
    for start in range(0, len(logits), rows):
        piece = logits[start : start + rows]
        yield piece, slice(where.start + start, where.start + start + len(piece))


def _add_outer(total: Tensor, logits: Tensor, hidden: Tensor, pieces: int) -> None:
    """`total += logits^T hidden`; half-precision products are summed in the precision of
    `total`.
    """
    if total.dtype == logits.dtype:
        total.addmm_(logits.t(), hidden)
        return
    rows = -(-len(total) // pieces)
    for start in range(0, len(total), rows):
        total[start : start + rows] += logits[:, start : start + rows].t() @ hidden
