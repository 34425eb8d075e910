"""Compares the memory of a whole training step with the minimum that any trainer needs.

The minimum is weights, gradients and Adam's two moments in float32, and what the body of a bare
model saves of one micro-batch for the backward pass. A trainer can waste memory on logits,
attention masks, copies of gradients and the optimizer's temporaries.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.head import most_held
from benchmarks.measuring import Result
from benchmarks.workload import node_config, random_batch
from services.trainer.learner import Learner
from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.hub_models import hub_arguments
from tests.engines.tiny_models import END_TOKEN_ID, PAD_TOKEN_ID, write_model_folder

BAR = 1.3
_TRAINED_BYTES = 16
"""Bytes of a parameter's float32 weight, gradient and two moments."""
_SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
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

    model: dict[str, int]
    prompt: int
    answers: int
    answer: int
    budget: int


async def measure_trainer_memory() -> Result:
    """The shapes of SmolLM2-135M, 16 answers of 64 tokens."""
    return measure_step("trainer-memory", StepShape(_SMOLLM2, prompt=64, answers=16, answer=64, budget=2048))


async def measure_trainer_memory_long() -> Result:
    """The same with four answers of 960 tokens after a prompt of 64."""
    return measure_step("trainer-memory-long", StepShape(_SMOLLM2, prompt=64, answers=4, answer=960, budget=2048))


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
        model={"path": str(_model(folder, shape)), "device": "cpu", "dtype": "float32"},
        trainer={"token_budget": shape.budget, "threads": 1, "warmup_steps": 0, "objective": "dapo"},
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


def _model(folder: Path, shape: StepShape) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **shape.model,
        max_position_embeddings=max(4096, shape.prompt + shape.answer),
        tie_word_embeddings=True,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        dtype="float32",
    )
    return write_model_folder(folder / "model", LlamaForCausalLM(config).eval())
