"""The single thread for the trainer's torch work, so that health checks, status and NATS keep
working during a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class TorchThread:
    """Runs one function after another."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")

    async def run(self, work: Callable[[], T]) -> T:
        """The result or exception of `work`, after all earlier calls are done."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def shutdown(self) -> None:
        """Accept no more work; the current call ends by itself."""
        self._worker.shutdown(wait=False, cancel_futures=True)
