"""What a training step is said to take is what a real step holds, by torch's own count, and follows what users set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen3MoeConfig

from benchmarks.memory_table import PAGE, TOKENS, WIDTH, shapes
from benchmarks.step_memory import StepShape, measure_step
from services.trainer.memory_need import LOGITS_BYTES, TrainingPlan, memory_need

_BODY = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
PLAN = TrainingPlan(dtype=torch.bfloat16, tokens=2048, width=512)


@pytest.mark.parametrize(
    ("vocabulary", "answer", "budget"), [(8_192, 120, 2048), (49_152, 248, 1024)], ids=["activations", "parameters"]
)
def test_a_measured_step_holds_at_most_what_is_said_and_not_much_less(vocabulary: int, answer: int, budget: int) -> None:
    shape = StepShape({**_BODY, "vocab_size": vocabulary}, prompt=8, answers=32, answer=answer, budget=budget)
    measured = 1e9 * measure_step("short", shape).product
    plan = TrainingPlan(dtype=torch.float32, tokens=budget, width=answer + 8)
    need = memory_need(LlamaConfig(**shape.model, tie_word_embeddings=True), plan)
    # The room for logits is that of a large batch's chunk.
    without_logits = need.total - LOGITS_BYTES
    assert 2 / 3 * without_logits < measured < need.total, (measured, need)


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
    assert memory_need(config, PLAN).states == 16 * parameters


def test_a_mixture_of_experts_is_not_guessed_at() -> None:
    config = Qwen3MoeConfig(**_BODY, vocab_size=1000, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=64)
    with pytest.raises(ValueError, match="depends on the text, as in mixtures of experts"):
        memory_need(config, PLAN)


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
