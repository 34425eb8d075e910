"""The parent's side of the sandbox: sends jobs to workers and returns their results in order.

Local and foreign groups never share a process: local groups go to workers (`local`), foreign ones
to a separate lane (`foreign`). A job fails for one of the reasons of `TaskError`, for
`task_mismatch`, or for `scoring_timeout`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.cancelling import cancel_and_wait
from shared.contracts.messages import Task
from shared.tasks.derive import TaskError
from shared.tasks.sandbox.foreign import ForeignLane
from shared.tasks.sandbox.jobs import Entry, JobResult, Request, ScoringJob
from shared.tasks.sandbox.local import LocalLane
from shared.tasks.sandbox.processes import Processes, SandboxError
from shared.tasks.sandbox.protocol import MAX_ANSWERS
from shared.tasks.verifiers import VerifierChoice

if TYPE_CHECKING:
    from shared.config.sections import TaskSpec, VerifierSection

_KILLED_S = 10.0


class ScorerPool:
    """A pool of workers. Call `start` before use and `close` to kill them, or use `async with`."""

    def __init__(
        self,
        *,
        workers: int,
        answer_timeout_s: float,
        memory_mb: int,
        tasks: Sequence[TaskSpec] = (),
        foreign_workers: int = 0,
        foreign_group_s: float = 5.0,
        newcomer_share: float = 0.25,
    ) -> None:
        """`answer_timeout_s`: wall-clock limit for one answer, and for deriving one task.
        `memory_mb`: address space of a worker.

        `tasks`: this node's sources, which determine the verifier of a dataset's answers, including
        other nodes' answers. `foreign_workers`: number of processes that score only foreign groups,
        each for at most `foreign_group_s` seconds of wall-clock time. `newcomer_share`: part of
        their time and room that newcomers together get while others could use all of it.
        """
        self._workers = workers
        self._foreign_workers = foreign_workers
        self._verifiers = VerifierChoice(tasks)
        self._processes = Processes(
            answer_timeout_s=answer_timeout_s,
            foreign_group_s=foreign_group_s,
            memory_bytes=memory_mb * 2**20,
            tasks=tasks,
            verifiers=self._verifiers,
        )
        self._local = LocalLane(self._processes.worker, self._fail_waiting)
        self._foreign = ForeignLane(foreign_group_s, self._processes.forker, newcomer_share)
        self.missing: dict[str, str] = {}
        """Protections that the system did not give the workers, by name (`confine.PROTECTIONS`),
        with cause and remedy.
        """

    @property
    def replaced(self) -> int:
        """Number of workers that were killed, died, or had grown too large, and were replaced."""
        return self._local.replaced + self._foreign.replaced

    async def start(self) -> None:
        """Start the workers and wait until they can take the first batch.

        Raises:
            SandboxError: workers do not start.
        """
        kinds = [self._processes.worker] * self._workers + [self._processes.forker] * self._foreign_workers
        starting = [asyncio.create_task(start()) for start in kinds]
        try:
            started = await asyncio.gather(*starting)
        except BaseException:
            # Cancel again only after a long time, because a second cancellation interrupts the wait
            # for a process that is being killed.
            await cancel_and_wait(*starting, again_s=_KILLED_S)
            await self.close()
            raise
        for child in started:
            self.missing |= child.missing
        self._local.begin(started[: self._workers])
        self._foreign.begin(started[self._workers :])

    async def close(self) -> None:
        """Kill the workers. Jobs that still wait fail with SandboxError."""
        await cancel_and_wait(*self._local.runners, *self._foreign.runners, again_s=_KILLED_S)
        await self._processes.kill()
        self._fail_waiting(SandboxError("the sandbox was closed"))

    @classmethod
    def from_config(
        cls, config: VerifierSection, *, tasks: Sequence[TaskSpec] = (), workers: int | None = None, foreign: bool = False
    ) -> ScorerPool:
        """A pool with the configuration's settings; `workers` overrides the number of workers.
        `tasks`: as in the constructor.

        `foreign`: whether it takes foreign groups too.
        """
        return cls(
            workers=workers or config.workers,
            answer_timeout_s=config.answer_timeout_s,
            memory_mb=config.worker_memory_mb,
            tasks=tasks,
            foreign_workers=config.foreign_workers if foreign else 0,
            foreign_group_s=config.foreign_group_s,
            newcomer_share=config.newcomer_share,
        )

    async def __aenter__(self) -> ScorerPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def score(self, groups: Sequence[tuple[Task, Sequence[str]]]) -> list[JobResult]:
        """The rewards of the completion texts of each of this node's own tasks, in the order of
        `groups`.

        Raises:
            TaskError: a task cannot be derived, or the derived task differs.
            SandboxError: as `run`.
        """
        jobs = [ScoringJob(ref=task.ref, texts=texts, expected=task, urgent=True) for task, texts in groups]
        results = await self.run(jobs)
        for result in results:
            if result.reason is not None:
                raise TaskError(result.reason, result.detail)
        return results

    async def run(self, jobs: Sequence[ScoringJob]) -> list[JobResult]:
        """Results in the order of `jobs`.

        Raises:
            SandboxError: the sandbox is closed, or its workers can no longer be started.
        """
        if not self._local.running:
            raise SandboxError("the sandbox is not running")
        if not jobs:
            return []
        request = Request(len(jobs), asyncio.get_running_loop().create_future())
        name_for = self._verifiers.name_for
        for place, job in enumerate(jobs):
            if len(job.texts) > MAX_ANSWERS:
                raise ValueError(f"{len(job.texts)} answers to one task: {MAX_ANSWERS} at most")
            entry = Entry(job, name_for(job.ref), request, place)
            entry.held = 1
            if job.sender is not None:
                if not self._foreign.running:
                    raise SandboxError("no process for foreign groups runs (verifier.foreign_workers)")
                self._foreign.offer(entry)
            else:
                self._local.offer(entry)
        self._local.dispatch_soon()
        await request.done
        return [result for result in request.results if result is not None]

    def foreign_senders(self) -> list[str]:
        """The senders whose groups are waiting or in progress."""
        return self._foreign.senders()

    def drop(self, sender: str) -> int:
        """Give up a sender's groups that are waiting or in progress, with the reason `dropped`.
        Returns their number.
        """
        return self._foreign.drop(sender)

    def _fail_waiting(self, error: SandboxError) -> None:
        self._local.fail_waiting(error)
        self._foreign.fail_waiting(error)
