"""Memory of a whole training step against what no trainer can do without.

That is weights, gradients and Adam's two moments in float32, and what the body of a bare model keeps of one micro-batch for the
backward pass. Logits, attention masks, copies of gradients and the optimiser's own work are what a trainer can waste.
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
from shared.hub_models import hub_arguments
from shared.messages import Batch
from tests.engines.tiny_models import END_TOKEN_ID, PAD_TOKEN_ID, write_model_folder

BAR = 1.3
_TRAINED_BYTES = 16
"""float32 weight, gradient and two moments of a parameter."""
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


@dataclass(frozen=True, slots=True)
class StepShape:
    """A model and a batch of one group with equal answers; `budget` padded tokens in a pass."""

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
    """Qwen's vocabulary over a small body, so that logits would be most of it."""
    return measure_step("trainer-memory-vocabulary", StepShape(_LARGE_VOCABULARY, prompt=64, answers=16, answer=240, budget=4096))


def measure_step(row: str, shape: StepShape) -> Result:
    started, vocabulary = time.monotonic(), shape.model["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        folder = _model(Path(name), shape)
        trainer = {"token_budget": shape.budget, "threads": 1, "warmup_steps": 0, "objective": "dapo"}
        config = node_config(
            Path(name),
            "nats://127.0.0.1:4222",
            model={"path": str(folder), "device": "cpu", "dtype": "float32"},
            trainer=trainer,
            generator={"max_new_tokens": shape.answer},
        )
        learner = Learner(config)
        parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        # After the first step the moments are there; weights and moments are then held whatever happens.
        learner.step(_batch(learner, shape, 1))
        second = _batch(learner, shape, 2)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            learner.step(second)
        ours = (_TRAINED_BYTES - 4) * parameters + most_held(recorded)
        rows = max(1, shape.budget // (shape.prompt + shape.answer))
        del learner
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


def saved_bytes(config: NodeConfig, rows: int, width: int) -> int:
    """What torch saves for the backward pass of the model's body over (rows, width) tokens, parameters not counted."""
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
        # The result is kept, or what was saved would be freed and counted twice where its memory is used again.
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
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        dtype="float32",
    )
    return write_model_folder(folder / "model", LlamaForCausalLM(config).eval())
