"""The simplest possible engine: one prompt at a time through `generate` of `transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from services.generator.engines.base import Engine, EngineSettings, PolicyLoadError, Sample, SamplingParams, UnsupportedByEngine


class PlainEngine(Engine):
    """The engine that `generator.engine = "plain"` chooses; its weights are float32."""

    name = "plain"

    def __init__(self, settings: EngineSettings) -> None:
        self._path, self._lock = settings.model_path, asyncio.Lock()
        self._model: Any = None

    async def start(self) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self._path)
        self._model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        async with self._lock:  # all samples of a call must come from one policy
            return [await asyncio.to_thread(self._answers, list(each), n, params, seed + at) for at, each in enumerate(prompts)]

    def _answers(self, prompt: list[int], n: int, params: SamplingParams, seed: int) -> list[Sample]:
        set_seed(seed)
        chance = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k} if params.temperature else {}
        asked = {"max_new_tokens": params.max_new_tokens, "do_sample": bool(chance), **chance}
        made = self._model.generate(torch.tensor([prompt] * n), return_dict_in_generate=True, output_scores=True, **asked)
        logprobs = self._model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
        return [self._sample(ids[len(prompt) :].tolist(), row.tolist()) for ids, row in zip(made.sequences, logprobs, strict=True)]

    def _sample(self, ids: list[int], logprobs: list[float]) -> Sample:
        end = self._model.generation_config.eos_token_id
        length = next((at + 1 for at, token in enumerate(ids) if token == end or (isinstance(end, list) and token in end)), None)
        text = self._tokenizer.decode(ids[:length], skip_special_tokens=True)
        return Sample(tuple(ids[:length]), text, "stop" if length else "length", tuple(logprobs[:length]), self.policy_version)

    async def load_policy(self, weights_file: Path, version: int) -> None:
        async with self._lock:
            weights, known = load_file(weights_file), self._model.state_dict()
            if wrong := [name for name, each in weights.items() if name not in known or known[name].shape != each.shape]:
                raise PolicyLoadError(f"policy {version}: {wrong[:3]} do not fit the model")
            self._model.load_state_dict(weights, strict=False)
            self.policy_version = version

    async def score(self, prompts: Any, completions: Any, params: SamplingParams) -> list[list[float]]:
        raise UnsupportedByEngine("the plain engine scores nothing; only checks between engines ask for it")

    async def close(self) -> None:
        self._model = None
