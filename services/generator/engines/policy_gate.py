"""A gate between calls that sample and swaps of the weights: a swap waits for running calls, later
calls wait for the swap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.generator.engines.base import PolicyLoadError


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
        """Keep the weights unchanged inside the block. Waits at most for one swap, which has a
        deadline.
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
    async def swapping(self, drain_timeout_s: float) -> AsyncIterator[None]:
        """Get exclusive access to the weights. Raises `PolicyLoadError` if running calls take
        longer than `drain_timeout_s` to finish.
        """
        async with self._one_swap:
            self._open.clear()
            try:
                try:
                    async with asyncio.timeout(drain_timeout_s):
                        await self._idle.wait()
                except TimeoutError:
                    raise PolicyLoadError(
                        f"{self._running} calls were still sampling after {drain_timeout_s:g} s: "
                        "the old policy stays; try again, or lower max_new_tokens or raise swap_timeout_s"
                    ) from None
                yield
            finally:
                self._open.set()
