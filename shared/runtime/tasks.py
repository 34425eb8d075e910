"""Running a service's loops together and stopping them together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until_stopped(stopping: asyncio.Event, *loops: Coroutine[Any, Any, None]) -> None:
    """Run `loops` until `stopping` is set, one of them raises, or all have returned; the rest are cancelled.

    Raises:
        BaseException: what the first failing loop raised.
    """
    running = {asyncio.create_task(loop) for loop in loops}
    stop = asyncio.create_task(stopping.wait())
    try:
        pending: set[asyncio.Task[Any]] = {*running, stop}
        while pending - {stop}:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is not stop:
                    task.result()
            if stop in done:
                return
    finally:
        leaving = {*running, stop}
        while leaving:
            # Again until it is heeded: before Python 3.12, `wait_for` swallows a cancellation that meets a result.
            for task in leaving:
                task.cancel()
            _, leaving = await asyncio.wait(leaving, timeout=0.5)
        await asyncio.gather(*running, stop, return_exceptions=True)


async def sleep_unless_stopped(stopping: asyncio.Event, seconds: float) -> bool:
    """Sleep; return True at once when `stopping` is set, else False after `seconds`."""
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return False
    return True
