"""Samples from N stacked policies at once, with a key-value cache: nodes x prompts x completions in
parallel.

The distribution is `processed_logprobs`, the engine's own.
Prompts whose completions have all ended leave the batch, so that one long answer does not keep
every prompt in the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.stacked_model import Leaves, Packing, StackedDecoder, attend_behind_prompt, padding_bias, prompt_pass
from services.generator.engines.base import SamplingParams
from services.generator.engines.transformers_engine import processed_logprobs

_LEAVE_BELOW = 0.75
"""Finished prompts are removed once at most this fraction of the prompts is unfinished; moving the
cache costs about as much as a step.
"""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion: token ids with the end token, their logprobs, and whether it ended with an
    end token.
    """

    token_ids: list[int]
    logprobs: list[float]
    ended: bool


@dataclass(slots=True)
class _Rows:
    """The unfinished completions, N nodes x G prompts x L completions. `prompt` is each prompt's
    position in the call.
    """

    prompt: Tensor
    alive: Tensor
    positions: Tensor
    lengths: Tensor
    prompt_keys: list[Tensor]
    prompt_values: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


@torch.no_grad()
def sample(
    model: StackedDecoder,
    leaves: Leaves,
    prompts: Sequence[Sequence[Sequence[int]]],
    count: int,
    params: SamplingParams,
    *,
    end_token: int,
    generator: torch.Generator,
) -> list[list[list[Sampled]]]:
    """Sample `count` completions of every prompt of every node: `[node][prompt][completion]`.

    prompts: token ids, `[node][prompt]`; nodes may have different numbers. Temperature 0 is greedy.
    """
    device = generator.device
    most = max((len(node_prompts) for node_prompts in prompts), default=0)
    if most == 0:
        return [[] for _ in prompts]
    ids, lengths = _padded(prompts, most, device)
    tokens, logprobs = _run(model, leaves, ids, lengths, count, params, end_token, generator)
    return _cut(prompts, tokens.tolist(), logprobs.tolist(), end_token, count)


def _run(
    model: StackedDecoder,
    leaves: Leaves,
    ids: Tensor,
    lengths: Tensor,
    count: int,
    params: SamplingParams,
    end_token: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Token ids and logprobs (N, G, L, max_new_tokens); ignore what follows an end token."""
    nodes, groups, width = ids.shape
    shape, device, steps = model.architecture, ids.device, params.max_new_tokens
    prompt, packing = prompt_pass(model, leaves, ids, lengths)
    logits = _after_prompts(model, leaves, prompt.hidden, packing, lengths, width)
    tokens = torch.full((nodes, groups, count, steps), end_token, dtype=torch.int64, device=device)
    logprobs = torch.zeros(nodes, groups, count, steps, device=device)

    def cache() -> list[Tensor]:
        return [
            torch.zeros(nodes, groups, count, shape.kv_heads, steps, shape.head_size, device=device) for _ in range(shape.layers)
        ]

    rows = _Rows(
        prompt=torch.arange(groups, device=device).expand(nodes, groups),
        alive=(lengths > 0).unsqueeze(2).expand(nodes, groups, count),
        positions=lengths,
        lengths=lengths,
        prompt_keys=[each.view(nodes, groups, *each.shape[1:]) for each in prompt.keys],
        prompt_values=[each.view(nodes, groups, *each.shape[1:]) for each in prompt.values],
        keys=cache(),
        values=cache(),
    )
    logits = logits.unsqueeze(2).expand(nodes, groups, count, shape.vocabulary)
    for step in range(steps):
        chosen, chosen_logprobs = _choose(logits, params, generator)
        where = rows.prompt.unsqueeze(2).expand_as(chosen)
        tokens[:, :, :, step].scatter_(1, where, torch.where(rows.alive, chosen, end_token))
        logprobs[:, :, :, step].scatter_(1, where, chosen_logprobs)
        rows.alive = rows.alive & (chosen != end_token)
        if step + 1 == steps or not bool(rows.alive.any()):
            break
        chosen = _let_go(rows, chosen)
        logits = _next_logits(model, leaves, rows, chosen, step)
    return tokens, logprobs


def _after_prompts(model: StackedDecoder, leaves: Leaves, hidden: Tensor, packing: Packing, lengths: Tensor, width: int) -> Tensor:
    """(N, G, vocabulary): the logits after each prompt's last token."""
    starts = torch.arange(lengths.shape[1], device=lengths.device) * width
    last = packing.places.gather(1, starts + (lengths - 1).clamp(min=0))
    return model.logits(leaves, hidden.gather(1, last.unsqueeze(2).expand(*last.shape, hidden.shape[2])))


def _choose(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    logprobs = processed_logprobs(logits, params)
    if params.temperature == 0.0:
        chosen = logprobs.argmax(dim=-1, keepdim=True)
    else:
        # Inverse transform sampling with one uniform number per row, in float64 so that the tail is
        # not rounded away.
        cumulative = logprobs.exp().double().cumsum(dim=-1)
        draw = torch.rand(logits.shape[:-1], generator=generator, device=logits.device, dtype=torch.float64).unsqueeze(-1)
        chosen = torch.searchsorted(cumulative, draw * cumulative[..., -1:], right=True).clamp(max=logits.shape[-1] - 1)
    return chosen.squeeze(-1), logprobs.gather(-1, chosen).squeeze(-1)


def _next_logits(model: StackedDecoder, leaves: Leaves, rows: _Rows, chosen: Tensor, step: int) -> Tensor:
    """(N, G, L, vocabulary) after token `step` of every completion. The prompt's keys and values
    are kept once per prompt and each completion adds its own, so that L completions of a long
    prompt take the memory of one. Prompts differ in length; `bias` masks the padding.
    """
    nodes, groups, count = chosen.shape
    shape = model.architecture
    width = rows.prompt_keys[0].shape[3]
    bias = padding_bias(rows.lengths, width)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows.keys[layer][:, :, :, :, step] = k.view(nodes, groups, count, shape.kv_heads, shape.head_size)
        rows.values[layer][:, :, :, :, step] = v.view(nodes, groups, count, shape.kv_heads, shape.head_size)
        out = attend_behind_prompt(
            q.view(nodes * groups, count, 1, shape.heads, shape.head_size),
            rows.keys[layer][:, :, :, :, : step + 1].flatten(0, 1),
            rows.values[layer][:, :, :, :, : step + 1].flatten(0, 1),
            rows.prompt_keys[layer].flatten(0, 1),
            rows.prompt_values[layer].flatten(0, 1),
            bias,
            None,
        )
        return out.view(nodes, groups * count, shape.heads, shape.head_size)

    positions = (rows.positions.unsqueeze(2).expand(nodes, groups, count) + step).flatten(1)
    hidden = model.body(leaves, model.embed(leaves, chosen.flatten(1)), positions, attend)
    return model.logits(leaves, hidden).view(nodes, groups, count, shape.vocabulary)


def _let_go(rows: _Rows, chosen: Tensor) -> Tensor:
    """Drop finished prompts once there are enough of them; returns `chosen` for the others."""
    growing = rows.alive.any(dim=2)
    groups = growing.shape[1]
    left = int(growing.sum(1).max())
    if left > _LEAVE_BELOW * groups:
        return chosen
    kept = torch.argsort((~growing).to(torch.uint8), dim=1, stable=True)[:, :left]
    node = torch.arange(growing.shape[0], device=kept.device).unsqueeze(1)
    rows.prompt, rows.alive = rows.prompt[node, kept], rows.alive[node, kept]
    rows.positions, rows.lengths = rows.positions[node, kept], rows.lengths[node, kept]
    for layers in (rows.prompt_keys, rows.prompt_values, rows.keys, rows.values):
        layers[:] = [each[node, kept] for each in layers]
    return chosen[node, kept]


def _padded(prompts: Sequence[Sequence[Sequence[int]]], most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(prompt) for node_prompts in prompts for prompt in node_prompts)
    ids = torch.zeros(len(prompts), most, longest, dtype=torch.int64)
    lengths = torch.zeros(len(prompts), most, dtype=torch.int64)
    for node, node_prompts in enumerate(prompts):
        for group, prompt in enumerate(node_prompts):
            ids[node, group, : len(prompt)] = torch.tensor(prompt)
            lengths[node, group] = len(prompt)
    return ids.to(device), lengths.to(device)


def _cut(
    prompts: Sequence[Sequence[Sequence[int]]],
    tokens: list[list[list[list[int]]]],
    logprobs: list[list[list[list[float]]]],
    end_token: int,
    count: int,
) -> list[list[list[Sampled]]]:
    """The sampled tokens including the end token, which the trainer needs so that the policy learns
    to end.
    """

    def one(ids: list[int], scores: list[float]) -> Sampled:
        ended = end_token in ids
        length = ids.index(end_token) + 1 if ended else len(ids)
        return Sampled(ids[:length], scores[:length], ended)

    return [
        [[one(tokens[node][group][row], logprobs[node][group][row]) for row in range(count)] for group in range(len(node_prompts))]
        for node, node_prompts in enumerate(prompts)
    ]
