"""A policy of any trainable architecture goes from the trainer's model through its file into a generator's engine, unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from services.generator.engines import SamplingParams, create_engine
from shared.model.loading import read_causal_lm
from shared.model.weights import policy_tensors, write_tensors
from tests.architectures.checks import PROMPTS, alone
from tests.architectures.table import committed_rows
from tests.architectures.tiny import NotSmall, tiny_config, tiny_model
from tests.engines.tiny_models import byte_tokenizer

VOCABULARY = 260
"""That of the tokenizer."""
ALWAYS = (
    "deepseek_v4",  # a table of integers among its weights
    "gpt2",  # tied embeddings
    "gpt_oss",  # fused experts
    "llama",
    "mamba",
)
TRAINABLE = sorted(kind for kind, row in committed_rows().items() if "not tried" not in row and "| refused |" not in row)


@pytest.fixture(autouse=True)
def _quiet_and_single() -> None:
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)


def check(kind: str, folder: Path) -> None:
    try:
        named = [name for name in ("vocab_size", "vocab_size_per_layer_input") if hasattr(tiny_config(kind), name)]
        tiny_model(kind, **dict.fromkeys(named, VOCABULARY)).save_pretrained(folder)
    except NotSmall as reason:
        pytest.skip(str(reason))
    byte_tokenizer().save_pretrained(folder)
    trained = read_causal_lm(str(folder), "", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)
    answer = [11, 12, 13, 14, 15, 16]
    with torch.no_grad():
        before = alone(trained, PROMPTS[0], answer)
        for parameter in trained.parameters():
            parameter.add_(0.1 * parameter.abs().mean().clamp(min=0.01) * torch.randn(parameter.shape, generator=generator))
        expected = alone(trained, PROMPTS[0], answer)
    assert (expected - before).abs().max() > 1e-3
    file = folder / "policy.safetensors"
    write_tensors(policy_tensors(trained), file)
    torch.testing.assert_close(torch.tensor(asyncio.run(scored(folder, file, answer))), expected, atol=1e-4, rtol=0)


async def scored(folder: Path, policy: Path, answer: list[int]) -> list[float]:
    """Logprobs of the answer's tokens, from an engine that has loaded the policy."""
    engine = create_engine("transformers", str(folder), max_model_len=60, threads=1, device="cpu", dtype="float32")
    try:
        await engine.start()
        await engine.load_policy(policy, 1)
        [logprobs] = await engine.score([PROMPTS[0]], [answer], SamplingParams())
        return list(logprobs)
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_published_policy_is_the_one_that_the_engine_samples_from(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(TRAINABLE) - set(ALWAYS)))
def test_a_published_policy_of_any_architecture_is_the_one_that_the_engine_samples_from(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)
