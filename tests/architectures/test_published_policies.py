"""A policy of any trainable architecture goes from the trainer's model through its file into a
generator's engine, unchanged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from services.generator.engines import SamplingParams, create_engine
from services.trainer.policy_model import with_adapters
from shared.config.model_section import ModelSection
from shared.config.trainer_section import LoraSection
from shared.model.loading import load_causal_lm
from shared.model.weights import Adapters, adapter_tensors, base_fingerprint, policy_tensors, write_tensors
from tests.architectures.checks import PROMPTS, alone
from tests.architectures.table import committed_outcomes
from tests.architectures.tiny import NotSmall, byte_model
from tests.engines.tiny_models import byte_tokenizer

ALWAYS = (
    "deepseek_v4",  # a table of integers among its weights
    "gpt2",  # tied embeddings
    "gpt_oss",  # fused experts
    "llama",
    "mamba",
)
TRAINABLE = sorted(kind for kind, row in committed_outcomes().items() if "not tried" not in row and "| refused |" not in row)


@pytest.fixture(autouse=True)
def _quiet_and_single() -> None:
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)


def write_folder(kind: str, folder: Path) -> None:
    try:
        byte_model(kind).save_pretrained(folder)
    except NotSmall as reason:
        pytest.skip(str(reason))
    byte_tokenizer().save_pretrained(folder)


def check(kind: str, folder: Path) -> None:
    write_folder(kind, folder)
    trained = load_causal_lm(ModelSection(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))
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


ADAPTED = {"gpt2": "all-linear", "gpt_oss": ["q_proj", "v_proj"], "llama": "all-linear", "mamba": ["in_proj", "x_proj"]}


@pytest.mark.parametrize("kind", ADAPTED)
def test_published_adapters_are_those_that_the_engine_samples_from(kind: str, tmp_path: Path) -> None:
    """GPT-2's layers keep their weights the other way round."""
    write_folder(kind, tmp_path)
    base = load_causal_lm(ModelSection(path=str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    answer = [11, 12, 13, 14, 15, 16]
    with torch.no_grad():
        before = alone(base, PROMPTS[0], answer)
    trained = with_adapters(base, LoraSection(rank=3, alpha=6.0, target_modules=ADAPTED[kind])).eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        expected = alone(trained, PROMPTS[0], answer)
    assert (expected - before).abs().max() > 1e-3
    file = tmp_path / "policy.safetensors.published"
    described = Adapters(rank=3, alpha=6.0, base=base_fingerprint(str(tmp_path)), dtype="float32")
    write_tensors(adapter_tensors(trained), file, described.metadata())
    torch.testing.assert_close(torch.tensor(asyncio.run(scored(tmp_path, file, answer))), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_published_policy_is_the_one_that_the_engine_samples_from(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(set(TRAINABLE) - set(ALWAYS)))
def test_a_published_policy_of_any_architecture_is_the_one_that_the_engine_samples_from(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)
