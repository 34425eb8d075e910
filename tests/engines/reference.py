"""What engines are compared with: logprobs of a Hugging Face model in float64, processed in numpy,
one sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.func import functional_call
from transformers import Qwen2ForCausalLM

from services.generator.engines import SamplingParams


def next_token_logits(model: Qwen2ForCausalLM, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
    """Float64 logits `[len(completion), vocabulary]`: row i is what token i of the completion was
    drawn from.
    """
    exact = {name: each.detach().double() for name, each in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad():
        logits = functional_call(model, exact, (torch.tensor([[*prompt, *completion]]),)).logits[0]
    return logits[len(prompt) - 1 : -1].numpy()


def process(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Log-probabilities of one row `[vocabulary]` under temperature, then top-k, then top-p; -inf
    for what is cut off.
    """
    if params.temperature > 0:
        logits = logits / params.temperature
        likeliest_first = np.argsort(-logits, kind="stable")
        kept = likeliest_first[: params.top_k] if params.top_k else likeliest_first
        if params.top_p < 1.0:
            mass_before = np.cumsum(softmax(logits[kept])) - softmax(logits[kept])
            kept = kept[mass_before < params.top_p]
        masked = np.full_like(logits, -np.inf)
        masked[kept] = logits[kept]
        logits = masked
    with np.errstate(divide="ignore"):
        return np.log(softmax(logits))


def reference_logprobs(
    model: Qwen2ForCausalLM, prompt: Sequence[int], completion: Sequence[int], params: SamplingParams
) -> list[float]:
    rows = next_token_logits(model, prompt, completion)
    return [float(process(row, params)[token_id]) for row, token_id in zip(rows, completion, strict=True)]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def chi_square_z(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return by how many standard deviations a chi-square statistic lies above its mean (Wilson and
    Hilferty 1931).

    Outcomes expected fewer than 5 times are counted as one.
    """
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
