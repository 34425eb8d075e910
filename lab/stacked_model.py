"""The forward pass of Qwen3 and Llama over a node axis: N policies, each over its own tokens, in
batched matrix products.

Tokens are packed for everything that is computed token by token: `(N, T, hidden)`, T the most
tokens any node has. Only attention works on rows: prompts as `(N x G, P)`, completions as `(N x G,
L, C)` behind the keys and values of their prompt, which are computed once for all L. Prompts and
completions are right-padded; padding is never attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lab.stacked_params import Architecture

Leaves = Mapping[str, Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries (N, T, H, D), keys and values (N, T, KV, D)) -> (N, T, H, D)."""

_FAR_BELOW = -1e30


@dataclass(frozen=True, slots=True)
class Packing:
    """The positions of packed tokens in rows. slots: (N, T) row position (row x width + column) of
    each packed token.

    places: (N, R x S) packed token at each row position; 0 where there is none. present: (N, R x S)
    bool.
    """

    slots: Tensor
    places: Tensor
    present: Tensor

    @classmethod
    def of(cls, present: Tensor) -> Packing:
        """Packing of the positions that `present` (N, R x S) marks, in order."""
        nodes, width = present.shape
        counts = present.sum(1)
        most = max(1, int(counts.max()))
        order = torch.argsort((~present).to(torch.uint8), dim=1, stable=True)[:, :most]
        places = (present.long().cumsum(1) - 1).clamp(min=0)
        return cls(order, places.masked_fill(~present, 0), present)

    def to_rows(self, packed: Tensor) -> Tensor:
        """(N, R x S, ...) from (N, T, ...)."""
        return _take(packed, self.places)

    def to_packed(self, rows: Tensor) -> Tensor:
        """(N, T, ...) from (N, R x S, ...)."""
        return _take(rows, self.slots)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """`values[n, index[n, i]]`: (N, A, ...) and (N, B) to (N, B, ...)."""
    nodes, size = values.shape[:2]
    offset = torch.arange(nodes, device=index.device).unsqueeze(1) * size
    flat = values.reshape(nodes * size, -1).index_select(0, (index + offset).flatten())
    return flat.view(*index.shape, *values.shape[2:])


class StackedDecoder:
    """The parts of the forward pass for one architecture. Holds the rotary tables but no
    parameters.
    """

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        self.architecture = architecture
        size = architecture.head_size
        inverse = 1.0 / architecture.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
        angles = torch.outer(torch.arange(architecture.max_length, dtype=torch.float32, device=device), inverse)
        self._cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
        # The first half's sign is folded in, so that rotating is one multiplication with the halves
        # swapped.
        self._sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)

    def embed(self, leaves: Leaves, ids: Tensor) -> Tensor:
        """(N, T, hidden) of token ids (N, T)."""
        table = leaves["embed"]
        nodes, vocabulary, hidden = table.shape
        offset = torch.arange(nodes, device=ids.device).unsqueeze(1) * vocabulary
        return functional.embedding(ids + offset, table.reshape(nodes * vocabulary, hidden))

    def body(self, leaves: Leaves, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All layers and the last norm over packed tokens (N, T, hidden) at `positions` (N, T)."""
        shape = self.architecture
        cos, sin = self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)
        nodes, tokens = positions.shape
        for layer in range(shape.layers):
            normed = _rms_norm(x, leaves[f"{layer}.norm_in"], shape.eps)
            qkv = _linear(normed, leaves[f"{layer}.qkv"]).view(nodes, tokens, shape.heads + 2 * shape.kv_heads, shape.head_size)
            q, k, v = torch.split_with_sizes(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
            if shape.qk_norm:
                q = _rms_norm(q, leaves[f"{layer}.q_norm"], shape.eps)
                k = _rms_norm(k, leaves[f"{layer}.k_norm"], shape.eps)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            x = x + _linear(attend(layer, q, k, v).flatten(2), leaves[f"{layer}.out"])
            normed = _rms_norm(x, leaves[f"{layer}.norm_mlp"], shape.eps)
            gate, up = _linear(normed, leaves[f"{layer}.gate_up"]).chunk(2, dim=-1)
            x = x + _linear(functional.silu(gate) * up, leaves[f"{layer}.down"])
        return _rms_norm(x, leaves["norm"], shape.eps)

    def logits(self, leaves: Leaves, hidden: Tensor) -> Tensor:
        """(N, T, vocabulary) of hidden states (N, T, hidden)."""
        return _linear(hidden, leaves["embed" if self.architecture.tied else "head"])


@dataclass(slots=True)
class PromptPass:
    """Hidden states of packed prompt tokens, and each layer's keys and values in rows: (N x G, KV,
    P, D).
    """

    hidden: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def prompt_pass(model: StackedDecoder, leaves: Leaves, ids: Tensor, lengths: Tensor) -> tuple[PromptPass, Packing]:
    """Run prompts (N, G, P), right-padded, of `lengths` (N, G); length 0 means no prompt."""
    nodes, groups, width = ids.shape
    columns = torch.arange(width, device=ids.device)
    packing = Packing.of((columns < lengths.unsqueeze(2)).flatten(1))
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = packing.to_rows(torch.cat([q, k, v], dim=2)).view(nodes * groups, width, -1, q.shape[3]).transpose(1, 2)
        in_rows_q, in_rows_k, in_rows_v = torch.split_with_sizes(rows, [q.shape[2], k.shape[2], v.shape[2]], dim=1)
        keys.append(in_rows_k)
        values.append(in_rows_v)
        repeat = q.shape[2] // k.shape[2]
        out = functional.scaled_dot_product_attention(
            in_rows_q, in_rows_k.repeat_interleave(repeat, 1), in_rows_v.repeat_interleave(repeat, 1), is_causal=True
        )
        return packing.to_packed(out.transpose(1, 2).reshape(nodes, groups * width, q.shape[2], q.shape[3]))

    packed_ids = packing.to_packed(ids.flatten(1).unsqueeze(2)).squeeze(2)
    positions = packing.slots % width
    hidden = model.body(leaves, model.embed(leaves, packed_ids), positions, attend)
    return PromptPass(hidden, keys, values), packing


def attend_behind_prompt(
    q: Tensor, k: Tensor, v: Tensor, prompt_keys: Tensor, prompt_values: Tensor, prompt_bias: Tensor, own_bias: Tensor | None
) -> Tensor:
    """Attention of completions to their prompt and to themselves, over one softmax.

    q: (B, L, C, H, D), B groups. k, v: (B, L, KV, S, D), S own positions. prompt_keys,
    prompt_values: (B, KV, P, D). prompt_bias: (B, 1, 1, 1, P), far below 0 on padding. own_bias:
    (C, S) or None. Returns (B, L, C, H, D).
    """
    groups, count, steps, heads, size = q.shape
    kv, own, width = k.shape[2], k.shape[3], prompt_keys.shape[2]
    repeat = heads // kv
    q = (q * size**-0.5).view(groups, count, steps, kv, repeat, size).permute(0, 3, 1, 4, 2, 5)  # B, KV, L, rep, C, D
    to_prompt = q.reshape(groups * kv, count * repeat * steps, size) @ prompt_keys.flatten(0, 1).transpose(1, 2)
    to_prompt = to_prompt.view(groups, kv, count, repeat * steps, width) + prompt_bias
    to_own = q.transpose(1, 2).reshape(groups * count * kv, repeat * steps, size) @ k.flatten(0, 2).transpose(1, 2)
    to_own = to_own.view(groups, count, kv, repeat, steps, own)
    if own_bias is not None:
        to_own = to_own + own_bias
    scores = torch.cat([to_prompt, to_own.transpose(1, 2).flatten(3, 4)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    prompt_weights, own_weights = torch.split_with_sizes(weights, [width, own], dim=-1)
    out = (prompt_weights.reshape(groups * kv, -1, width) @ prompt_values.flatten(0, 1)).view(
        groups, kv, count, repeat, steps, size
    )
    mine = own_weights.transpose(1, 2).reshape(groups * count * kv, repeat * steps, own) @ v.flatten(0, 2)
    out = out + mine.view(groups, count, kv, repeat, steps, size).transpose(1, 2)
    return out.permute(0, 2, 4, 1, 3, 5).reshape(groups, count, steps, heads, size)


def padding_bias(lengths: Tensor, width: int) -> Tensor:
    """(B, 1, 1, 1, P) to add to the scores: 0 where there is a prompt token, far below 0
    elsewhere.
    """
    absent = torch.arange(width, device=lengths.device) >= lengths.flatten().unsqueeze(1)
    return torch.zeros(absent.shape, device=lengths.device).masked_fill(absent, _FAR_BELOW)[:, None, None, None, :]


def causal_bias(steps: int, device: torch.device) -> Tensor:
    """(C, C) to add to the scores: far below 0 on what comes later."""
    return torch.full((steps, steps), _FAR_BELOW, device=device).triu(1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = weight.view(weight.shape[0], *(1,) * (x.ndim - 2), weight.shape[1])
    return functional.rms_norm(x, (x.shape[-1],), eps=eps) * scale


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], dim=-1) * sin
