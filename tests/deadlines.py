"""Deadlines that end every test. From the most informative one to the last resort:

1. A coroutine test has `ASYNC_TEST_TIMEOUT_S`, or the seconds of `@pytest.mark.deadline(seconds)`.
It fails with each of its tasks' stacks, and its tasks are ended.
2. Every test, including its fixtures, has `timeout` of pyproject.toml, or the seconds of
`@pytest.mark.timeout(seconds)` (pytest-timeout, by signal). It fails with the stack of each thread;
fixtures end what they started, and the suite continues.
3. If no signal helps, because the main thread is stuck in native code, `faulthandler_timeout`
writes all stacks and ends the run.
4. `session_timeout` ends the run between two tests.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

from shared.cancelling import cancel_and_wait

ASYNC_TEST_TIMEOUT_S = 300.0
_FIXTURES_S = 300.0
"""Additional time for the fixtures of a coroutine test with a long deadline."""
MISSING = (
    "pytest-timeout is not installed: a test that hangs hangs for ever (it is part of the extra `dev`: pip install -e '.[dev]' -c "
    "requirements/constraints.txt)"
)


def run_coroutine_test(test: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
    """Run `test` in its own event loop, and end the tasks that it leaves running."""

    async def run() -> str | None:
        task, this = asyncio.create_task(test(), name="the test"), asyncio.current_task()
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            others = {each for each in asyncio.all_tasks() if each not in (task, this)}
            if not done:
                return f"the test did not end within {timeout_s:g} s\n{_stacks([task, *others])}"
            task.result()
            return None
        finally:
            await cancel_and_wait(task)
            await cancel_and_wait(*(each for each in asyncio.all_tasks() if each is not this))

    overdue = asyncio.run(run())
    if overdue is not None:
        pytest.fail(overdue, pytrace=False)


def allow_for_long_deadlines(items: Iterable[pytest.Item], default_s: float) -> None:
    """Extend the second deadline for a coroutine test whose own deadline is later, so that it fails
    with the more informative one.
    """
    for item in items:
        deadline = item.get_closest_marker("deadline")
        if deadline is not None and item.get_closest_marker("timeout") is None:
            needed_s = float(deadline.args[0]) + _FIXTURES_S
            if needed_s > default_s:
                item.add_marker(pytest.mark.timeout(needed_s))


def _stacks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    text = io.StringIO()
    for task in tasks:
        task.print_stack(file=text)
    return text.getvalue()
