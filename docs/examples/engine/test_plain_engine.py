"""`pytest test_plain_engine.py`, in the environment that the example is installed in. `MODEL`: any
small model's folder; the repository contains the demo's.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from swarm_example_engine import PlainEngine

from services.generator.engines.base import EngineSettings, PolicyLoadError, SamplingParams

MODEL = os.environ.get("MODEL") or str(Path(__file__).parents[3] / "models" / "base")
PROMPTS = [[5, 6, 7], [8, 9]]


def test_samples_come_with_their_logprobs_and_follow_the_weights(tmp_path: Path) -> None:
    async def scene() -> None:
        engine = PlainEngine(EngineSettings(model_path=MODEL))
        await engine.start()
        params = SamplingParams(temperature=1.0, max_new_tokens=6)
        first = await engine.generate(PROMPTS, 3, params, seed=1)
        assert [len(samples) for samples in first] == [3, 3]
        assert first == await engine.generate(PROMPTS, 3, params, seed=1)
        for sample in (sample for samples in first for sample in samples):
            assert len(sample.token_ids) == len(sample.logprobs) and max(sample.logprobs) <= 0.0
        weights = load_file(Path(MODEL) / "model.safetensors")
        save_file({name: torch.zeros_like(each) for name, each in weights.items()}, tmp_path / "policy.safetensors")
        await engine.load_policy(tmp_path / "policy.safetensors", 7)
        (answer,) = (await engine.generate(PROMPTS[:1], 1, params, seed=1))[0]
        assert answer.policy_version == 7 and len({round(each, 4) for each in answer.logprobs}) == 1  # all tokens alike
        save_file({"no.such.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
        with pytest.raises(PolicyLoadError):
            await engine.load_policy(tmp_path / "other.safetensors", 8)
        await engine.close()

    asyncio.run(scene())
