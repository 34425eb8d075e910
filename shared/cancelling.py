"""Cancels tasks reliably.

Before Python 3.12 `asyncio.wait_for` swallows a cancellation that coincides with the result it
waits for: the task then continues as if nobody had cancelled it. Libraries use it too. So after
`cancel()` a task counts as ended only once it has been seen to end.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

log = structlog.get_logger(__name__)
T = TypeVar("T")

ASKED_AGAIN_S = 1.0
"""How long a cancelled task has to end before it is cancelled again, which interrupts a clean-up
that takes longer.
"""
PATIENCE_S = 30.0
"""A task that still runs after repeated cancellation for this long is a bug."""


class StillRunningError(RuntimeError):
    """Tasks still run after repeated cancellation; the message has each task's stack."""


async def cancel_and_wait(
    *tasks: asyncio.Future[Any] | None, again_s: float = ASKED_AGAIN_S, patience_s: float = PATIENCE_S
) -> None:
    """Cancel `tasks` and return when all have ended. None stands for a task that was never started.

    A task that is still running after `again_s` is cancelled again, and so on; one that was already
    cancelled before this call gets its first cancellation here after `again_s`. A task's exception
    that nobody has retrieved is logged, not raised. If the caller is cancelled, it still waits, and
    CancelledError is raised afterwards.

    Raises:
        StillRunningError: some are still running after `patience_s`.
        ValueError: the caller would wait for itself.
    """
    known = [task for task in tasks if task is not None]
    left = {task for task in known if not task.done()}
    if asyncio.current_task() in left:
        raise ValueError("a task cannot cancel itself and wait for its own end")
    for task in left:
        if not (isinstance(task, asyncio.Task) and task.cancelling()):
            task.cancel()
    loop, interrupted = asyncio.get_running_loop(), False
    ask_again_at, give_up_at = loop.time() + again_s, loop.time() + patience_s
    while left:
        if loop.time() >= give_up_at:
            raise StillRunningError(_stands(left, patience_s))
        try:
            _, left = await asyncio.wait(left, timeout=max(0.0, min(ask_again_at, give_up_at) - loop.time()))
        except asyncio.CancelledError:
            interrupted, left = True, {task for task in left if not task.done()}
        if loop.time() >= ask_again_at:
            ask_again_at = loop.time() + again_s
            for task in left:
                task.cancel()
    for task in known:
        # asyncio's own flag for an exception that nobody has retrieved; one that somebody has
        # retrieved is already dealt with.
        unseen = not task.cancelled() and getattr(task, "_log_traceback", True)
        if unseen and (error := task.exception()) is not None:
            log.warning("failed_and_cancelled", task=_name(task), error=f"{type(error).__name__}: {error}")
    if interrupted:
        raise asyncio.CancelledError


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all `work`, done at once. When one fails, or the caller is cancelled, the
    others are cancelled, and have ended before the first one's exception is raised.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


@contextmanager
def heeded_cancellation() -> Iterator[None]:
    """Wraps a call of a library that may swallow a cancellation: CancelledError is raised even so,
    whatever the call returned or raised.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except Exception:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


def _name(task: asyncio.Future[Any]) -> str:
    return f"{task.get_name()} ({task.get_coro()})" if isinstance(task, asyncio.Task) else repr(task)


def _stands(left: Iterable[asyncio.Future[Any]], patience_s: float) -> str:
    """The stack of each task, which an engineer needs to find the bug."""
    text = io.StringIO()
    for task in left:
        if isinstance(task, asyncio.Task):
            task.print_stack(file=text)
        else:
            print(repr(task), file=text)
    return f"still running after {patience_s:g} s of being cancelled again and again:\n{text.getvalue()}"


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
