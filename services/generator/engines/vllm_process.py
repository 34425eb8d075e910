"""vLLM's process: starts it, puts it to sleep while a trainer uses the same GPU, and ends it."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.generator.engines.base import EngineError, EngineSettings
from shared.hub_models import hub_arguments

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
