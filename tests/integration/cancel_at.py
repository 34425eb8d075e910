"""Cancelling a coroutine at one chosen point of those at which it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from enum import Enum
from typing import Any


class Moment(Enum):
    """When the cancellation comes: while it waits, or together with what it waits for, before it
    has seen that.
    """

    WAITING = "waiting"
    MEETS_THE_RESULT = "meets the result"


class CancelledAt:
    """Awaits `work` and cancels the task that does, at the point where `work` waits for the
    `turn`th time.
    """

    def __init__(self, work: Coroutine[Any, Any, object], turn: int, moment: Moment) -> None:
        self._work, self._turn, self._moment = work, turn, moment
        self.came = False
        """Whether `work` waited that often."""

    async def run(self) -> object:
        """Await `work`, as a task."""
        return await self

    def __await__(self) -> Generator[Any, Any, object]:
        # Steps through the coroutine by hand, so that what it waits for is seen before the event
        # loop sees it.
        waits, turns, thrown, sent = self._work.__await__(), 0, None, None
        while True:
            try:
                waited = waits.send(sent) if thrown is None else waits.throw(thrown)
            except StopIteration as end:
                return end.value
            turns += 1
            if turns == self._turn:
                self._cancel(waited)
            thrown = None
            try:
                sent = yield waited
            except BaseException as error:
                thrown = error

    def _cancel(self, waited: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.came = True
        if waited is None or self._moment is Moment.WAITING:
            asyncio.get_running_loop().call_soon(task.cancel)
        else:
            waited.add_done_callback(lambda _: task.cancel())
