"""The engine over plain transformers: the default on a machine without a GPU.

One worker thread owns the model, so the event loop stays responsive, and calls and swaps run one
after the other. So no sample mixes two versions, and no locks are needed.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from services.generator.engines.adapters import AdapterSlot, adapters_in, warn_of_dtype
from services.generator.engines.base import Engine, EngineError, EngineSettings, PolicyLoadError, Sample, SamplingParams
from services.generator.engines.batching import WAYS, UnsafeModel, batches, choose_batching
from services.generator.engines.decoding import Row, sample_completions, score_completions
from services.generator.engines.model_folder import ModelFolder, check_policy_file, load_base, read_model_folder
from shared.model.adapter_file import Adapters
from shared.model.loading import resolve_device, resolve_dtype

_T = TypeVar("_T")


class TransformersEngine(Engine):
    """Samples in a batched loop with a key-value cache; exact and reproducible on a CPU.

    Args:
        model_path: Model folder or hub name.
        revision: Commit of a hub name.
        dtype: A torch dtype's name, or `auto`: see `resolve_dtype`.
        device: Torch device, or `auto`: the GPU if there is one.
        max_model_len: Most tokens of prompt and completion together.
        threads: Torch threads for the whole process, or None to leave them unchanged.
        max_batch_rows: Most completions computed together, where one prompt's `n` always stay
            together; limits memory.
    """

    name = "transformers"

    def __init__(
        self,
        model_path: str,
        *,
        revision: str = "",
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int = 2048,
        threads: int | None = None,
        max_batch_rows: int = 256,
    ) -> None:
        self._model_path = model_path
        self._revision = revision
        self._device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self._dtype = resolve_dtype(dtype, self._device)
        self._max_model_len = max_model_len
        self._threads = threads
        self._max_batch_rows = max_batch_rows
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers-engine")
        self._closing = threading.Event()
        self._model: Any = None
        self._adapters: AdapterSlot | None = None
        self._is_base = True
        self._told_of_dtype = False
        self._folder: ModelFolder | None = None
        self._way = WAYS[-1]

    async def start(self) -> None:
        """Load the model in the worker thread."""
        await self._in_worker(self._start)

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample as `Engine.generate` describes. Calls are queued."""
        given_up = threading.Event()
        try:
            return await self._in_worker(lambda: self._generate(prompts, n, params, seed, given_up))
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Load as `Engine.load_policy` describes, after all earlier calls."""
        await self._in_worker(lambda: self._load_policy(weights_file, version))

    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """Score as `Engine.score` describes."""
        return await self._in_worker(lambda: score_completions(self._model, prompts, completions, params))

    async def rest(self) -> None:
        """Wait for an abandoned call to end and free torch's cached memory on a GPU. The weights
        stay.
        """
        if self._folder is not None and not self._closing.is_set():
            await self._in_worker(torch.cuda.empty_cache if self._device.type == "cuda" else lambda: None)

    async def close(self) -> None:
        """Stop at the next token, then release the model."""
        self._closing.set()
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._model = None

    async def _in_worker(self, work: Callable[[], _T]) -> _T:
        if self._closing.is_set():
            raise EngineError("the transformers engine is closed: create a new one")
        if self._folder is None and work != self._start:
            raise EngineError("the transformers engine has not started: await start() first")
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _start(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._model = load_base(self._model_path, self._revision, dtype=self._dtype, device=self._device).requires_grad_(False)
        folder = read_model_folder(self._model_path, max_model_len=self._max_model_len, revision=self._revision, model=self._model)
        self._adapters = AdapterSlot(self._model)
        try:
            self._way = choose_batching(self._model, context_length=folder.context_length, pad_token_id=folder.pad_token_id)
        except UnsafeModel as error:
            raise EngineError(f"model {self._model_path}: {error}: use another engine or another model") from error
        if self._way is not WAYS[0]:
            structlog.get_logger("generator").warning("engine_batches_less", model=self._model_path, way=self._way.name)
        self._folder = folder

    def _generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, seed: int, given_up: threading.Event
    ) -> list[list[Sample]]:
        assert self._folder is not None

        # A thread cannot be cancelled. This check before every token ends it within one.
        def keep_on() -> None:
            if self._closing.is_set():
                raise EngineError("the transformers engine was closed while it was sampling")
            if given_up.is_set():
                raise EngineError("the caller no longer waits for these samples")

        limits = self._folder.new_token_limits(prompts, params.max_new_tokens)
        generator = torch.Generator(self._device).manual_seed(seed)
        n_sampled = 1 if params.temperature == 0.0 else n
        prompts_at_once = max(1, self._max_batch_rows // n_sampled)
        groups: list[list[Sample]] = [[] for _ in prompts]
        for numbers in batches(prompts, self._way, prompts_at_once):
            rows = sample_completions(
                self._model,
                [prompts[number] for number in numbers],
                n_sampled,
                params,
                [limits[number] for number in numbers],
                way=self._way,
                generator=generator,
                end_token_ids=self._folder.end_token_ids,
                pad_token_id=self._folder.pad_token_id,
                keep_on=keep_on,
            )
            samples = map(self._sample, rows)
            for number in numbers:
                groups[number] = list(itertools.islice(samples, n_sampled)) * (n // n_sampled)
        return groups

    def _sample(self, row: Row) -> Sample:
        assert self._folder is not None
        return Sample(
            token_ids=tuple(row.token_ids),
            text=self._folder.text(row.token_ids),
            finish_reason=row.finish_reason,
            logprobs=tuple(row.logprobs),
            policy_version=self.policy_version,
        )

    def _load_policy(self, weights_file: Path, version: int) -> None:
        assert self._folder is not None and self._adapters is not None
        adapters = adapters_in(weights_file, self._folder, self._model_path, self._revision)
        if adapters is None:
            check_policy_file(weights_file, self._folder)
        try:
            # Read everything into memory before the first parameter changes, so that an I/O error
            # cannot leave half a policy.
            loaded = load_file(weights_file, device="cpu")
        except (OSError, SafetensorError) as error:
            raise PolicyLoadError(f"policy file {weights_file}: unreadable ({error}): fetch it again") from error
        if adapters is None:
            self._adapters.clear()
            self._is_base = False
            self._copy(loaded)
        else:
            self._load_adapters(weights_file, loaded, *adapters)
        self.policy_version = version

    def _load_adapters(self, weights_file: Path, tensors: dict[str, torch.Tensor], adapters: Adapters, modules: list[str]) -> None:
        assert self._adapters is not None
        base: dict[str, torch.Tensor] | None = None
        try:
            if not self._is_base:
                # The trainer may have trained full weights before; its adapters belong to the
                # base's weights.
                base = load_base(self._model_path, self._revision, dtype=self._dtype, device=torch.device("cpu")).state_dict()
            self._adapters.load(tensors, adapters, modules)
        except EngineError as error:
            raise PolicyLoadError(f"policy file {weights_file}: holds adapters, and their base cannot be read: {error}") from error
        except (ValueError, MemoryError, RuntimeError) as error:
            raise PolicyLoadError(
                f'policy file {weights_file}: its adapters do not fit this model ({error}): set trainer.lora.publish = "merged"'
            ) from error
        if base is not None:
            self._copy(base)
            self._is_base = True
        if not self._told_of_dtype:
            warn_of_dtype(adapters, self._model.dtype)
            self._told_of_dtype = True

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        assert self._folder is not None and self._adapters is not None
        mine = self._adapters.base_tensors()
        with torch.no_grad():
            for tensor_name in self._folder.tensor_shapes:
                mine[tensor_name].copy_(weights[tensor_name])


def open_engine(settings: EngineSettings) -> TransformersEngine:
    """The engine for `generator.engine = "transformers"`. Raises `ModelLoadError` if the machine
    lacks its device.
    """
    return TransformersEngine(
        settings.model_path,
        revision=settings.revision,
        dtype=settings.dtype,
        device=str(resolve_device(settings.device)),
        max_model_len=settings.max_model_len,
        threads=settings.threads,
    )
