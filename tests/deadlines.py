"""Every test ends. From the most telling deadline to the last resort:

1. A coroutine test has `ASYNC_TEST_TIMEOUT_S`, or what `@pytest.mark.deadline(seconds)` says. It
   fails with where each of its tasks stands, and its tasks are ended.
2. Every test, its fixtures included, has `timeout` of pyproject.toml, or what
   `@pytest.mark.timeout(seconds)` says (pytest-timeout, by signal). It fails with the stack of each
   thread; fixtures end what they started, and the suite goes on.
3. Where no signal helps, because the main thread is stuck in foreign code, `faulthandler_timeout`
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

ASYNC_TEST_TIMEOUT_S = 120.0
_FIXTURES_S = 300.0
"""What fixtures may take beside a coroutine test with a long deadline of its own."""
MISSING = (
    "pytest-timeout is not installed: a test that hangs hangs for ever (it is part of the extra `dev`: pip install -e '.[dev]' -c "
    "requirements/constraints.txt)"
)


def run_coroutine_test(test: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
    """Run `test` in an event loop of its own. What it leaves running is ended."""

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
    """A coroutine test whose own deadline is the later one is not ended by the earlier, less
    telling one.
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
