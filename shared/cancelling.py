"""Cancels tasks reliably.

Before Python 3.12 `asyncio.wait_for` swallows a cancellation that coincides with the result it
waits for: the task then continues as if nobody had cancelled it. Libraries use it too, so a
cancelled task has not ended until somebody has seen it end.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

log = structlog.get_logger(__name__)

ASKED_AGAIN_S = 1.0
"""A task has this long to leave before it is cancelled again; its clean-up is interrupted where it
takes longer.
"""
PATIENCE_S = 30.0
"""A task that goes on for this long although it was cancelled again and again is a bug."""


class StillRunningError(RuntimeError):
    """Tasks go on although they were cancelled again and again; the message says where each of them
    stands.
    """


async def cancel_and_wait(
    *tasks: asyncio.Future[Any] | None, again_s: float = ASKED_AGAIN_S, patience_s: float = PATIENCE_S
) -> None:
    """Cancel `tasks` and return when all have ended; None stands for a task that was never started.

    A task that was cancelled by somebody else before is given `again_s` to heed that; then it is
    cancelled again, and so on. What a task raised that nobody has looked at is logged, not raised.
    A cancellation of the caller does not shorten the wait; it is raised after it.

    Raises:
        StillRunningError: some go on after `patience_s`.
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
        # asyncio's own mark of a failure that nobody has looked at; whoever has, has dealt with it.
        unseen = not task.cancelled() and getattr(task, "_log_traceback", True)
        if unseen and (error := task.exception()) is not None:
            log.warning("failed_and_cancelled", task=_name(task), error=f"{type(error).__name__}: {error}")
    if interrupted:
        raise asyncio.CancelledError


@contextmanager
def heeded_cancellation() -> Iterator[None]:
    """Around a library's call that may swallow a cancellation: it is raised after all, whatever the
    call returned or raised.
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
    """What an engineer needs to find the bug: the stack of each task."""
    text = io.StringIO()
    for task in left:
        if isinstance(task, asyncio.Task):
            task.print_stack(file=text)
        else:
            print(repr(task), file=text)
    return f"still running after {patience_s:g} s of being cancelled again and again:\n{text.getvalue()}"
