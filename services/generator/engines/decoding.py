"""Batched sampling from a causal LM with a key-value cache: functions from tensors to tensors,
independent of any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from services.generator.engines.base import SamplingParams
from services.generator.engines.batching import Batching, BatchRows


@dataclass(slots=True)
class Row:
    """One completion while it grows."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


def processed_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities `[..., vocabulary]`, float32, after temperature, top-k and top-p; `-inf`
    for excluded tokens.
    """
    logits = logits.float()
    if params.temperature == 0.0:
        return torch.log_softmax(logits, dim=-1)
    if params.temperature != 1.0:
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        threshold = torch.topk(logits, params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if params.top_p < 1.0:
        ascending, order = torch.sort(logits, dim=-1)
        cut = torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1.0 - params.top_p
        cut[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    return torch.log_softmax(logits, dim=-1)


@torch.inference_mode()
def sample_completions(
    model: Any,
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    limits: Sequence[int],
    *,
    way: Batching,
    generator: torch.Generator,
    end_token_ids: Sequence[int],
    pad_token_id: int,
    keep_on: Callable[[], None],
) -> list[Row]:
    """Sample `n` completions of each prompt and return them prompt by prompt.

    The prompts are computed together, so they must have the same length unless `way` pads. Rows
    that have ended are dropped once they are half of the batch. `limits[i]` is the most tokens that
    may follow prompt i. `keep_on` is called before every step and may raise.
    """
    device = model.device
    text = BatchRows(model, prompts, n, way, pad_token_id)
    row_limits = torch.tensor(limits, device=device).repeat_interleave(n)
    ends = torch.tensor(list(end_token_ids), device=device)

    rows = [Row([], [], "length") for _ in range(len(prompts) * n)]
    batch = list(range(len(rows)))
    alive = torch.ones(len(rows), dtype=torch.bool, device=device)
    for step in range(1, max(limits) + 1):
        keep_on()
        logprobs = processed_logprobs(text.logits, params)
        if params.temperature == 0.0:
            chosen = logprobs.argmax(dim=-1, keepdim=True)
        else:
            chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
        ended = torch.isin(chosen.squeeze(1), ends)
        for row, token_id, logprob, is_alive, is_end in zip(
            batch,
            chosen.squeeze(1).tolist(),
            logprobs.gather(1, chosen).squeeze(1).tolist(),
            alive.tolist(),
            ended.tolist(),
            strict=True,
        ):
            if is_alive:
                rows[row].token_ids.append(token_id)
                rows[row].logprobs.append(logprob)
                if is_end:
                    rows[row].finish_reason = "stop"
        alive = alive & ~ended & (row_limits > step)
        n_alive = int(alive.sum())
        if n_alive == 0:
            break
        if 2 * n_alive <= len(batch) and text.can_keep:
            kept = alive.nonzero().squeeze(1)
            text.keep(kept)
            chosen, row_limits = chosen[kept], row_limits[kept]
            batch = [batch[index] for index in kept.tolist()]
            alive = alive[kept]
        text.append(chosen)
    return rows


@torch.inference_mode()
def score_completions(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[float]]:
    """Teacher-forced processed logprobs of the completions' tokens, one sequence at a time."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([*prompt, *completion], device=model.device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = processed_logprobs(logits, params)
        scores.append(logprobs.gather(1, ids[len(prompt) :, None]).squeeze(1).tolist())
    return scores
