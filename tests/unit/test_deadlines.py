"""What `tests.deadlines` promises of coroutine tests."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.deadlines import run_coroutine_test


def test_a_test_that_hangs_fails_with_where_each_of_its_tasks_stands() -> None:
    async def publish_for_ever() -> None:
        await asyncio.sleep(3600)

    async def hang() -> None:
        await asyncio.gather(asyncio.create_task(publish_for_ever()), asyncio.Event().wait())

    with pytest.raises(pytest.fail.Exception, match=r"(?s)within 0\.1 s.*in hang.*in publish_for_ever"):
        run_coroutine_test(hang, 0.1)


@pytest.mark.slow
def test_a_test_that_goes_on_when_it_is_cancelled_ends_all_the_same() -> None:
    ended = []

    async def stubborn() -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        ended.append("yes")

    with pytest.raises(pytest.fail.Exception):
        run_coroutine_test(stubborn, 0.05)
    assert ended == ["yes"]


def test_what_a_test_leaves_running_is_ended_and_its_own_failure_told() -> None:
    left: list[asyncio.Task[None]] = []

    async def fail() -> None:
        left.append(asyncio.create_task(asyncio.sleep(3600)))
        await asyncio.sleep(0)
        raise AssertionError("its own")

    with pytest.raises(AssertionError, match="its own"):
        run_coroutine_test(fail, 30.0)
    assert left[0].cancelled()


def test_a_skip_inside_of_a_test_is_one() -> None:
    async def skip() -> None:
        pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_coroutine_test(skip, 30.0)


async def test_coroutine_functions_are_run(request: pytest.FixtureRequest) -> None:
    assert inspect.iscoroutinefunction(request.function)
    assert asyncio.current_task() is not None
