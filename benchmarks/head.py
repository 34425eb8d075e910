"""Measures the memory of the output layer, softmax and their gradient with logits in chunks,
against a bar in bytes.
"""

from __future__ import annotations

import resource
import time

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Result
from services.trainer.gradient.forward import CHUNK_BYTES, LogitTransform, chunked_logprobs

TOKENS, VOCABULARY, HIDDEN_SIZE = 16_384, 151_936, 8
BAR_BYTES = 1e9
_COPIES_HELD = 5
"""How many copies of all logits the plain way holds (`tests/unit/test_trainer_chunked_head.py`
counts at least 3 without a soft cap).
"""


def peak_bytes(
    tokens: int, vocabulary: int, hidden_size: int, *, chunk_bytes: int | None = CHUNK_BYTES, softcap: float | None = None
) -> int:
    """Peak bytes, beyond hidden states, weight and targets, while logprobs and gradients are
    computed on the CPU.

    chunk_bytes: None means all logits at once, by automatic differentiation. In float32; every
    allocation of torch's is counted.
    """
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        if chunk_bytes is None:
            logprobs = _all_at_once(hidden, weight, targets, softcap)
        else:
            transform = LogitTransform(softcap=softcap)
            logprobs, _ = chunked_logprobs(hidden, weight, None, targets, transform=transform, chunk_bytes=chunk_bytes)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return most_held(recorded)


def most_held(recorded: profile) -> int:
    """Peak bytes beyond those held at the start, by torch's own count of every allocation."""
    held, peak = 0, 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _all_at_once(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


async def measure_trainer_head() -> Result:
    """As many tokens as the default token budget, with Qwen's vocabulary, forward and backward."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    peak = peak_bytes(TOKENS, VOCABULARY, HIDDEN_SIZE)
    seconds = time.monotonic() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    whole = 4 * TOKENS * VOCABULARY
    return Result(
        row="trainer-head",
        measured="memory of the trainer's output layer, softmax and entropy, forward and backward: logits in chunks",
        against="1 GB (1e9 bytes)",
        workload=f"{TOKENS:,} tokens, vocabulary {VOCABULARY:,}, float32, hidden size {HIDDEN_SIZE} so that only logits count",
        unit="GB",
        ratios=[peak / BAR_BYTES],
        bar=1.0,
        direction="at most",
        product=peak / BAR_BYTES,
        plain=None,
        remarks=[
            f"every allocation as torch's profiler counts it, gradients included; the process grew by {grown / 1e9:.2f} GB",
            f"all logits at once are {whole / 1e9:.1f} GB; the plain way, not run here, holds them {_COPIES_HELD} times",
            f"chunks of {CHUNK_BYTES / 2**20:.0f} MiB; {seconds:.0f} s on one thread",
        ],
    )
