"""What the first process of a container owes the others: to wait for those that ended after whoever
started them had. `swarm join` and `swarm up` are that process in the image.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from shared.cancelling import cancel_and_wait

_EVERY_S = 0.5


@asynccontextmanager
async def reaping_orphans(own: Collection[int], *, first_process: bool | None = None) -> AsyncIterator[None]:
    """Reap what ends and is not among `own` at that time, the process numbers that somebody else
    waits for. Only where this process is the first one, unless `first_process` says so.

    A killed service's scorers would stay zombies for good, and while its group has a member, even a
    zombie, the service is not started again for half a minute (`Process.left_behind`).
    """
    if first_process is None:
        first_process = os.getpid() == 1
    if not first_process:
        yield
        return
    reaping = asyncio.create_task(_reap(own))
    try:
        yield
    finally:
        await cancel_and_wait(reaping)


async def _reap(own: Collection[int]) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        _wait_for_ended(_children() - set(own))


def _wait_for_ended(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(ChildProcessError):  # somebody else was quicker
            os.waitpid(pid, os.WNOHANG)


def _children() -> set[int]:
    """All of this process's, orphans too."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended
            found |= {int(word) for word in file.read_text().split()}
    return found
