"""Starts the sandbox's processes, with a few retries, and ends all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shared.tasks.derive import from_package
from shared.tasks.file_rows import held_of
from shared.tasks.sandbox.child import FORKER, WORKER, Child, WorkerLost
from shared.tasks.verifiers import VerifierChoice

if TYPE_CHECKING:
    from shared.config.sections import TaskSpec

START_ATTEMPTS = 3


class SandboxError(Exception):
    """Workers do not start; the message says what to check."""


class Processes:
    """Starts workers and forkers, and keeps track of each until it has ended."""

    def __init__(
        self,
        *,
        answer_timeout_s: float,
        foreign_group_s: float,
        memory_bytes: int,
        tasks: Sequence[TaskSpec],
        verifiers: VerifierChoice,
    ) -> None:
        """`answer_timeout_s` is for workers, `foreign_group_s` for forkers; `memory_bytes`: address
        space of each. `tasks`: this node's sources. `verifiers`: imported at once.
        """
        self._answer_timeout_s = answer_timeout_s
        self._foreign_group_s = foreign_group_s
        self._memory_bytes = memory_bytes
        self._sources = [[spec.dataset, spec.canonical_config, spec.verifier] for spec in tasks]
        self._installed = sorted({spec.dataset for spec in tasks if from_package(spec.dataset)})
        self._rows = held_of(spec.dataset for spec in tasks)
        self._verifiers = verifiers
        self._children: set[Child] = set()
        """All that were started and have not been seen to end. Kept here because the task that was
        to end one may have been cancelled before it could.
        """

    async def worker(self) -> Child:
        """Start a process for local groups.

        Raises:
            SandboxError: it does not start.
        """
        return await self._started(WORKER, self._answer_timeout_s)

    async def forker(self) -> Child:
        """Start a process for foreign groups.

        Raises:
            SandboxError: it does not start.
        """
        return await self._started(FORKER, self._foreign_group_s, self._sources)

    async def kill(self) -> None:
        """Kill all that are still running."""
        await asyncio.gather(*(child.kill() for child in self._children))
        self._children.clear()

    async def _started(self, module: str, timeout_s: float, first_frame: Any = None) -> Child:
        """Tries `START_ATTEMPTS` times, because a machine that is briefly short of memory may kill
        a starting process. Children that have ended are also removed here, so that their number
        does not grow.
        """
        cause = ""
        for _ in range(START_ATTEMPTS):
            try:
                child = await Child.start(
                    memory_bytes=self._memory_bytes,
                    answer_timeout_s=timeout_s,
                    verifiers=self._verifiers.names,
                    sources=self._installed,
                    rows=self._rows,
                    module=module,
                    first_frame=first_frame,
                )
                self._children = {known for known in self._children if known.running} | {child}
                return child
            except WorkerLost as error:
                cause = str(error)
        raise SandboxError(
            f"scorer processes do not start ({START_ATTEMPTS} attempts, {cause}): "
            "raise verifier.worker_memory_mb, or see standard error for the cause"
        )
