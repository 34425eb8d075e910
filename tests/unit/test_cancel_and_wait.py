"""Tasks end for certain: also those that swallow a cancellation, and also where who ends them is
cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.cancelling import StillRunningError, cancel_and_wait, run_until_stopped, together


class Swallowing:
    """Goes on after its first `cancellations`, as a loop around Python 3.11's `wait_for` may."""

    def __init__(self, cancellations: int) -> None:
        self.left = cancellations

    async def run(self) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if self.left == 0:
                    raise
                self.left -= 1


async def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("cancellations", [0, 1, 5])
async def test_a_task_that_swallows_its_first_cancellations_ends(cancellations: int) -> None:
    task = await started(Swallowing(cancellations).run())
    await cancel_and_wait(task, again_s=0.01)
    assert task.cancelled()


@pytest.mark.parametrize("turns", range(5))
async def test_a_loop_around_wait_for_ends_though_the_cancellation_meets_a_result(turns: int) -> None:
    came: asyncio.Queue[int] = asyncio.Queue()

    async def read() -> None:
        while True:
            await asyncio.wait_for(came.get(), 3600)

    task = await started(read())
    await asyncio.sleep(0.01)
    came.put_nowait(1)
    for _ in range(turns):
        await asyncio.sleep(0)
    await cancel_and_wait(task, again_s=0.01)
    assert task.cancelled()


async def test_a_task_that_never_ends_is_reported_with_where_it_stands() -> None:
    stubborn = Swallowing(1_000_000)
    task = await started(stubborn.run())
    with pytest.raises(StillRunningError, match=r"(?s)after 0\.05 s.*in run"):
        await cancel_and_wait(task, again_s=0.01, patience_s=0.05)
    stubborn.left = 0
    await cancel_and_wait(task)


async def test_clean_up_is_given_its_time_before_it_is_interrupted() -> None:
    cleaned = []

    async def clean_up_slowly() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append("yes")

    task = await started(clean_up_slowly())
    task.cancel()
    await asyncio.sleep(0)
    # Somebody has asked already: asking again at once would interrupt the clean-up.
    await cancel_and_wait(task, again_s=5.0)
    assert cleaned == ["yes"]


@pytest.mark.parametrize("times", [1, 3])
async def test_who_waits_for_the_end_and_is_cancelled_waits_on_and_stays_cancelled(times: int) -> None:
    task = await started(Swallowing(3).run())
    ending = await started(cancel_and_wait(task, again_s=0.02))
    for _ in range(times):
        ending.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert task.cancelled()


async def test_what_a_task_raises_at_its_end_is_logged_and_not_raised() -> None:
    async def fail() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise OSError("disk full")

    other = await started(Swallowing(0).run())
    task = await started(fail())
    with capture_logs() as logs:
        await cancel_and_wait(task, other)
    assert other.cancelled()
    assert [(line["event"], line["error"]) for line in logs] == [("failed_and_cancelled", "OSError: disk full")]


@pytest.mark.parametrize("looked_at", [False, True])
async def test_a_failure_from_before_is_logged_unless_somebody_has_looked_at_it(looked_at: bool) -> None:
    async def fail() -> None:
        raise OSError("before")

    task = await started(fail())
    if looked_at:
        assert isinstance(task.exception(), OSError)
    with capture_logs() as logs:
        await cancel_and_wait(task, None)
        await cancel_and_wait(task)
    assert [line["error"] for line in logs] == ([] if looked_at else ["OSError: before"])


async def test_a_task_cannot_wait_for_its_own_end() -> None:
    with pytest.raises(ValueError, match="its own end"):
        await cancel_and_wait(asyncio.current_task())


@pytest.mark.slow
async def test_loops_that_swallow_their_cancellation_do_not_outlive_the_service() -> None:
    stopping, swallowing = asyncio.Event(), [Swallowing(1), Swallowing(2)]
    service = await started(run_until_stopped(stopping, *(each.run() for each in swallowing)))
    await asyncio.sleep(0)
    stopping.set()
    await asyncio.wait_for(service, 120)
    assert [each.left for each in swallowing] == [0, 0]


async def test_when_one_of_several_fails_the_others_have_ended_before_its_error_is_raised() -> None:
    ended: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("first")

    async def goes_on() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)  # a clean-up takes a while
            ended.append("other")

    with pytest.raises(KeyError, match="first"):
        await together(goes_on(), fails())
    assert ended == ["other"]


async def test_several_give_their_results_in_order_and_end_with_their_caller() -> None:
    assert await together(*(asyncio.sleep(0, number) for number in range(3))) == [0, 1, 2]
    assert await together() == []
    before = asyncio.all_tasks()
    caller = await started(together(asyncio.sleep(3600), asyncio.sleep(3600)))
    await cancel_and_wait(caller)
    assert asyncio.all_tasks() == before
