"""What a training step is said to take is what a real step holds, by torch's own count, and follows
what users set.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, FalconConfig, Gemma2Config, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from benchmarks.memory import most_held
from benchmarks.memory_table import PAGE, TOKENS, WIDTH, shapes
from benchmarks.workload import node_config, random_batch
from services.trainer.learner import Learner
from services.trainer.memory_need import TrainingPlan, memory_need
from shared.contracts.messages import Batch
from swarm_cli.model.memory import memory_lines, model_memory
from tests.constants import with_constants
from tests.engines.tiny_models import END_TOKEN_ID, PAD_TOKEN_ID, write_model_folder

_BODY = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
PLAN = TrainingPlan(dtype=torch.bfloat16, tokens=2048, width=512)


@pytest.mark.parametrize(
    ("config", "answer", "budget"),
    [
        (LlamaConfig(**_BODY, vocab_size=8_192, tie_word_embeddings=True), 120, 2048),
        (LlamaConfig(**_BODY, vocab_size=32_768, tie_word_embeddings=True), 56, 256),
        pytest.param(LlamaConfig(**_BODY, vocab_size=4_096), 376, 128, marks=pytest.mark.long),
        pytest.param(Gemma2Config(**_BODY, vocab_size=8_192, head_dim=64), 248, 1024, marks=pytest.mark.long),
        pytest.param(LlamaConfig(**_BODY, vocab_size=49_152, tie_word_embeddings=True), 120, 512, marks=pytest.mark.long),
        pytest.param(LlamaConfig(**_BODY, vocab_size=8_192), 504, 128, marks=pytest.mark.long),
    ],
    ids=[
        "activations",
        "parameters",
        "texts wider than the budget",
        "soft-capped attention",
        "more parameters",
        "texts much wider than the budget",
    ],
)
def test_a_measured_step_holds_at_most_what_is_said_and_not_much_less(
    config: PreTrainedConfig, answer: int, budget: int, tmp_path: Path
) -> None:
    measured = step_bytes(config, answer, budget, tmp_path)
    need = memory_need(config, TrainingPlan(dtype=torch.float32, tokens=budget, width=answer + 8))
    # The room for logits is that of a large batch's chunk.
    without_logits = need.total - need.logits
    assert 0.6 * without_logits < measured < need.total, (measured, need)


def step_bytes(config: PreTrainedConfig, answer: int, budget: int, folder: Path) -> float:
    """Most that is held in a learner's second step, on two groups of its own: see
    `benchmarks.memory`.
    """
    model = AutoModelForCausalLM.from_config(config)
    for token in ("eos_token_id", "pad_token_id", "bos_token_id"):
        setattr(model.config, token, {"eos_token_id": END_TOKEN_ID}.get(token, PAD_TOKEN_ID))
        setattr(model.generation_config, token, getattr(model.config, token))
    write_model_folder(folder / "model", model)
    trainer = {"token_budget": budget, "warmup_steps": 0}
    section = {"path": str(folder / "model"), "device": "cpu", "dtype": "float32", "threads": 1}
    asked = node_config(folder, "nats://127.0.0.1:4222", model=section, trainer=trainer, generator={"max_new_tokens": answer})
    learner = Learner(with_constants(asked, trainer={"packed_rows": False}))

    def batch(number: int) -> Batch:
        return random_batch(
            number,
            groups=2,
            completions=8,
            prompt_tokens=8,
            completion_tokens=(answer, answer),
            vocabulary=200,
            tokenizer_hash=learner.rules.tokenizer_hash,
            end_token_id=learner.rules.end_token_id or 0,
        )

    learner.step(batch(1))
    second = batch(2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        learner.step(second)
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    return 12 * parameters + most_held(recorded)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**_BODY, vocab_size=1000),
        GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=1000),
        Gemma2Config(**_BODY, vocab_size=1000, head_dim=64),
    ],
    ids=lambda config: config.model_type,
)
def test_what_users_set_moves_the_need_as_it_should(config: object) -> None:
    whole = memory_need(config, PLAN)
    half = memory_need(config, replace(PLAN, tokens=1024))
    recomputed = memory_need(config, replace(PLAN, gradient_checkpointing=True))
    split = memory_need(config, replace(PLAN, processes=4))
    assert whole.activations / 2.2 < half.activations < whole.activations
    assert recomputed.activations < whole.activations / 2
    assert split.states == -(-whole.states // 4)
    assert split.together > 0 == whole.together


def test_adapters_need_no_gradients_or_moments_of_the_base() -> None:
    config = LlamaConfig(**_BODY, vocab_size=8_192)
    parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    adapters = memory_need(config, replace(PLAN, lora_rank=8))
    assert 2 * parameters < adapters.states < 3 * parameters
    assert memory_need(config, PLAN).states == 20 * parameters


def test_a_mixture_of_experts_is_not_guessed_at() -> None:
    config = Qwen3MoeConfig(**_BODY, vocab_size=1000, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=64)
    with pytest.raises(ValueError, match="cannot be traced without data, for example because the text chooses its experts"):
        memory_need(config, PLAN)


def test_what_cannot_be_told_is_left_out_and_the_rest_is_told() -> None:
    config = FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000)
    found = model_memory(config, torch.float32, rank=8, tokens=512, width=128, gpus=1)
    whole, adapters = found.methods
    assert whole.plain is not None and whole.recomputing is not None and adapters.plain is None
    text = "\n".join(memory_lines(found, "float32", 512, 128))
    assert "LoRA of rank 8                              –" in text
    assert "not estimated: only a model with data shows whether its linear layers can be adapted" in text


@pytest.mark.parametrize("width", [0, 4096])
def test_rows_that_no_model_of_this_kind_reads_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more|reads texts of up to 2048 tokens"):
        memory_need(LlamaConfig(**_BODY, vocab_size=1000, max_position_embeddings=2048), replace(PLAN, width=width))


def test_the_configuration_of_a_caller_is_not_changed() -> None:
    config = LlamaConfig(**_BODY, vocab_size=1000)
    before = config.to_dict()
    memory_need(config, PLAN)
    assert config.to_dict() == before


def test_the_page_says_what_is_computed_today() -> None:
    name = "SmolLM2-135M"
    need = memory_need(shapes()[name], TrainingPlan(dtype=torch.bfloat16, tokens=TOKENS, width=WIDTH))
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))
    assert row.startswith(f"| {name} | 135 M | {need.total / 1e9:.1f} GB |")
