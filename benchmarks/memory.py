"""Compares the memory of a training step, and of its output layer alone, with a bar.

A whole step is compared with the minimum that any trainer needs: weights, gradients and Adam's two
moments in float32, and what the body of a bare model saves of one micro-batch for the backward
pass. A trainer can waste memory on logits, attention masks, copies of gradients and the optimizer's
temporaries.
"""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Result
from benchmarks.workload import SMOLLM2_135M, node_config, random_batch, random_llama
from services.trainer.gradient.forward import CHUNK_BYTES, LogitTransform, chunked_logprobs
from services.trainer.learner import Learner
from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.hub_models import hub_arguments

BAR = 1.3
_TRAINED_BYTES = 16
"""Bytes of a parameter's float32 weight, gradient and two moments."""
_LARGE_VOCABULARY = {
    "vocab_size": 151_936,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_NARROW_BODY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True, slots=True)
class StepShape:
    """A model, and a batch of one group whose answers have equal length; `budget`: padded tokens in
    a pass.
    """

    model: dict[str, Any]
    prompt: int
    answers: int
    answer: int
    budget: int


async def measure_trainer_memory() -> Result:
    """The shapes of SmolLM2-135M, 16 answers of 64 tokens."""
    return measure_step("trainer-memory", StepShape(SMOLLM2_135M, prompt=64, answers=16, answer=64, budget=2048))


async def measure_trainer_memory_long() -> Result:
    """The same with four answers of 960 tokens after a prompt of 64."""
    return measure_step("trainer-memory-long", StepShape(SMOLLM2_135M, prompt=64, answers=4, answer=960, budget=2048))


async def measure_trainer_memory_vocabulary() -> Result:
    """Qwen's vocabulary on a small body, so that logits would take most of the memory."""
    return measure_step("trainer-memory-vocabulary", StepShape(_LARGE_VOCABULARY, prompt=64, answers=16, answer=240, budget=4096))


def measure_step(row: str, shape: StepShape) -> Result:
    """What one step of a shape holds at once, beside the least it could, as the row `row`."""
    started, vocabulary = time.monotonic(), shape.model["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        config = _config(Path(name), shape)
        parameters, held = held_in_a_step(config, shape)
        ours = (_TRAINED_BYTES - 4) * parameters + held
        rows = max(1, shape.budget // (shape.prompt + shape.answer))
        needed = _TRAINED_BYTES * parameters + saved_bytes(config, min(rows, shape.answers), shape.prompt + shape.answer)
    return Result(
        row=row,
        measured="trainer, GB held at once at most during `Learner.step`",
        against="weights, gradients and moments in float32, and what a bare model's body saves of one micro-batch",
        workload=f"{parameters / 1e6:.0f} M parameters, vocabulary {vocabulary:,}, {shape.answers} answers of {shape.answer} "
        f"tokens after a prompt of {shape.prompt}, micro-batches of {shape.budget:,} tokens; float32, AdamW, gradient norm clipped",
        unit="GB",
        ratios=[ours / needed],
        bar=BAR,
        direction="at most",
        product=ours / 1e9,
        plain=needed / 1e9,
        remarks=[
            f"every allocation as torch's profiler counts it; {time.monotonic() - started:.0f} s on one thread",
            f"all logits of a micro-batch at once would be {4 * shape.budget * vocabulary / 1e9:.1f} GB, five times over",
        ],
    )


async def measure_trainer_memory_width() -> Result:
    """One answer of 4,096 and one of 32,768 tokens."""
    return measure_width("trainer-memory-width", 4096, 32_768)


def measure_width(row: str, narrow: int, wide: int) -> Result:
    """The ratio of a step's memory per token on one answer of `wide` tokens, prompt included, to
    that on one of `narrow` tokens.

    It would reveal a mask of width x width, which for 32,768 tokens takes 1 GB in bytes and 4 GB in
    float32, twice as much as everything else.
    """
    started, held = time.monotonic(), []
    for width in (narrow, wide):
        shape = StepShape(_NARROW_BODY, prompt=64, answers=2, answer=width - 64, budget=width)
        with tempfile.TemporaryDirectory() as name:
            held.append(held_in_a_step(_config(Path(name), shape), shape)[1])
    return Result(
        row=row,
        measured=f"trainer, kB a token held at once at most during `Learner.step` on answers of {wide:,} tokens",
        against=f"the same on answers of {narrow:,} tokens",
        workload="two answers in passes of one; a body of 2 layers of 64, so small that a mask of width x width would stand out",
        unit="kB",
        ratios=[held[1] / wide / (held[0] / narrow)],
        bar=BAR,
        direction="at most",
        product=held[1] / wide / 1e3,
        plain=held[0] / narrow / 1e3,
        remarks=[f"every allocation as torch's profiler counts it; {time.monotonic() - started:.0f} s on one thread"],
    )


def held_in_a_step(config: NodeConfig, shape: StepShape) -> tuple[int, int]:
    """The number of parameters, and the second step's peak bytes in addition to weights and
    moments.
    """
    learner = Learner(config)
    # The moments exist after the first step; from then on weights and moments are always held.
    learner.step(_batch(learner, shape, 1))
    second = _batch(learner, shape, 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        learner.step(second)
    return sum(parameter.numel() for parameter in learner.model.parameters()), most_held(recorded)


def _config(folder: Path, shape: StepShape) -> NodeConfig:
    return node_config(
        folder,
        "nats://127.0.0.1:4222",
        model={
            "path": str(random_llama(folder, shape.model, length=max(4096, shape.prompt + shape.answer))),
            "device": "cpu",
            "dtype": "float32",
        },
        trainer={"token_budget": shape.budget, "warmup_steps": 0, "objective": "dapo"},
        generator={"max_new_tokens": shape.answer},
    )


def saved_bytes(config: NodeConfig, rows: int, width: int) -> int:
    """Bytes that torch saves for the backward pass of the model's body over (rows, width) tokens,
    without parameters.
    """
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(
        config.model.path, dtype=torch.float32, **hub_arguments(config.model.path, config.model.revision)
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The result is kept. Otherwise saved tensors would be freed, and counted twice when their
        # memory is reused.
        result = model(input_ids=torch.randint(4, 200, (rows, width)), use_cache=False).last_hidden_state
    assert result.requires_grad
    return sum(found.values())


def _batch(learner: Learner, shape: StepShape, number: int) -> Batch:
    return random_batch(
        number,
        groups=1,
        completions=shape.answers,
        prompt_tokens=shape.prompt,
        completion_tokens=(shape.answer, shape.answer),
        vocabulary=200,
        tokenizer_hash=learner.rules.tokenizer_hash,
        end_token_id=learner.rules.end_token_id or 0,
    )


HEAD_TOKENS, HEAD_VOCABULARY, HEAD_WIDTH = 16_384, 151_936, 8
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
    peak = peak_bytes(HEAD_TOKENS, HEAD_VOCABULARY, HEAD_WIDTH)
    seconds = time.monotonic() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    whole = 4 * HEAD_TOKENS * HEAD_VOCABULARY
    return Result(
        row="trainer-head",
        measured="memory of the trainer's output layer, softmax and entropy, forward and backward: logits in chunks",
        against="1 GB (1e9 bytes)",
        workload=f"{HEAD_TOKENS:,} tokens, vocabulary {HEAD_VOCABULARY:,}, float32, hidden size {HEAD_WIDTH}: only logits count",
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
