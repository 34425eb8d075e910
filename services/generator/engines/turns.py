"""An engine that shares its device with a trainer: awake while it answers, and resting while others have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.generator.engines.base import Engine, EngineError, Sample, SamplingParams
from shared.device_turns import DeviceTurns

_REST_S = 60.0


class TurnTakingEngine(Engine):
    """Another engine, in turns. Calls that come while nobody else waits share one turn; else they go into the next.

    Args:
        engine: does the work; not yet started.
        turns: this process's place at the device.
    """

    def __init__(self, engine: Engine, turns: DeviceTurns) -> None:
        self._engine, self._turns = engine, turns
        self.name = engine.name
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._entry = asyncio.Lock()

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """Version of the weights that answer now."""
        return self._engine.policy_version

    async def start(self) -> None:
        """Start the engine in a turn of its own: loading takes the most memory."""
        async with self._turn(waking=False):
            await self._engine.start()

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample as `Engine.generate` says, when it is this process's turn."""
        async with self._turn():
            return await self._engine.generate(prompts, n, params, seed=seed)

    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Load as `Engine.load_policy` says, when it is this process's turn."""
        async with self._turn():
            await self._engine.load_policy(weights_file, version)

    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """Score as `Engine.score` says, when it is this process's turn."""
        async with self._turn():
            return await self._engine.score(prompts, completions, params)

    async def healthy(self) -> bool:
        """Return whether the engine is."""
        return await self._engine.healthy()

    async def close(self) -> None:
        """Close the engine, in whoever's turn: it takes nothing."""
        await self._engine.close()

    @asynccontextmanager
    async def _turn(self, *, waking: bool = True) -> AsyncIterator[None]:
        async with self._entry:
            if self._running and self._turns.wanted():
                await self._idle.wait()
            if not self._running:
                await self._take(waking)
            self._running += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                await self._give_up()

    async def _take(self, waking: bool) -> None:
        try:
            await self._turns.take()
        except OSError as error:
            raise EngineError(f"no turn on the device ({error}): see to node.var_dir, or unset model.device_turns") from error
        try:
            if waking:
                await self._engine.wake()
        except BaseException:
            self._turns.give_up()
            raise

    async def _give_up(self) -> None:
        try:
            async with asyncio.timeout(_REST_S):
                await self._engine.rest()
        except TimeoutError:
            raise EngineError(f"engine {self.name}: still computing {_REST_S:.0f} s after its call ended: restarting") from None
        finally:
            self._turns.give_up()
            self._idle.set()
