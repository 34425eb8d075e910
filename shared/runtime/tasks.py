"""Runs a service's loops together and stops them together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shared.cancelling import cancel_and_wait

T = TypeVar("T")


async def run_until_stopped(stopping: asyncio.Event, *loops: Coroutine[Any, Any, None]) -> None:
    """Run `loops` until `stopping` is set, one of them raises, or all have returned; the rest are
    cancelled.

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
        await cancel_and_wait(*running, stop)


async def sleep_unless_stopped(stopping: asyncio.Event, seconds: float) -> bool:
    """Sleep; return True at once when `stopping` is set, else False after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return False
    return True


async def unless_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T | None:
    """The result of `work`; None if the service is stopped and `work` does not end within another
    `grace_s`.

    An unreachable server must not prevent the last checkpoint from being written in time.
    """
    task, stop = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=grace_s)
        return task.result() if task.done() else None
    finally:
        await cancel_and_wait(stop, task)
