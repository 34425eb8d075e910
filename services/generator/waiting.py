"""Waits for the server of an engine that computes elsewhere, for as long as it is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.generator.engines.base import EngineAway
from shared.contracts.status_figures import STARTING
from shared.runtime import ServiceContext

WAITING = "waiting for the engine's server"
"""The state of a generator whose engine's server is away."""
_PAUSE_S = 1.0
_TOLD_EVERY_S = 60.0

T = TypeVar("T")


class ServerWait:
    """Repeats what an absent server has not answered, because a restart would not bring it back."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`, which is called again for as long as it raises `EngineAway`."""
        told_at: float | None = None
        while True:
            try:
                result = await ask()
            except EngineAway as error:
                self._context.status.state(WAITING)
                if told_at is None or time.monotonic() - told_at >= _TOLD_EVERY_S:
                    told_at = time.monotonic()
                    self._context.log.warning("engine_away", reason=str(error), consequence="waiting until it answers")
                await asyncio.sleep(_PAUSE_S)
            else:
                if told_at is not None:
                    self._context.status.state("generating" if self._context.ready else STARTING)
                    self._context.log.info("engine_back")
                return result
