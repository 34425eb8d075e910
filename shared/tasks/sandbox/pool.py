"""The parent's side of the sandbox: jobs go to workers, and their results come back in order.

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
    """A pool of workers. `start` before use, `close` kills them; or `async with`."""

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
        """`answer_timeout_s`: wall clock for one answer, and for deriving one task. `memory_mb`:
        address space of a worker.

        `tasks`: this node's sources, which say by which verifier a dataset's answers are judged,
        also those of other nodes. `foreign_workers` serve foreign groups and nothing else, each
        group for `foreign_group_s` seconds of wall clock at most; of their time and room newcomers
        together have `newcomer_share` while others want it all.
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
        """Protections that the system did not give the workers: name (`confine.PROTECTIONS`) to
        cause and remedy.
        """

    @property
    def replaced(self) -> int:
        """Workers that were killed or died, or had grown, and were replaced."""
        return self._local.replaced + self._foreign.replaced

    async def start(self) -> None:
        """Start the workers and wait until the first batch can be taken.

        Raises:
            SandboxError: workers do not start.
        """
        kinds = [self._processes.worker] * self._workers + [self._processes.forker] * self._foreign_workers
        starting = [asyncio.create_task(start()) for start in kinds]
        try:
            started = await asyncio.gather(*starting)
        except BaseException:
            # Rarely again: a second time interrupts the wait for a process that is being killed.
            await cancel_and_wait(*starting, again_s=_KILLED_S)
            await self.close()
            raise
        for child in started:
            self.missing |= child.missing
        self._local.begin(started[: self._workers])
        self._foreign.begin(started[self._workers :])

    async def close(self) -> None:
        """Kill the workers; jobs still waiting fail with SandboxError."""
        await cancel_and_wait(*self._local.runners, *self._foreign.runners, again_s=_KILLED_S)
        await self._processes.kill()
        self._fail_waiting(SandboxError("the sandbox was closed"))

    @classmethod
    def from_config(
        cls, config: VerifierSection, *, tasks: Sequence[TaskSpec] = (), workers: int | None = None, foreign: bool = False
    ) -> ScorerPool:
        """A pool as the configuration says; `workers` overrides how many. `tasks` as in the
        constructor.

        `foreign`: it takes foreign groups too.
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

    async def score(self, groups: Sequence[tuple[Task, Sequence[str]]]) -> list[list[float]]:
        """Rewards for the completion texts of each of this node's own tasks, in the order of
        `groups`.

        Raises:
            TaskError: a task does not derive, or derives to something else.
            SandboxError: as `run`.
        """
        jobs = [ScoringJob(ref=task.ref, texts=texts, expected=task, urgent=True) for task, texts in groups]
        results = await self.run(jobs)
        for result in results:
            if result.reason is not None:
                raise TaskError(result.reason, result.detail)
        return [result.rewards for result in results]

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
        """Whose groups wait or are in work."""
        return self._foreign.senders()

    def drop(self, sender: str) -> int:
        """Give up what a sender has waiting and in work, with the reason `dropped`. Returns how
        many groups.
        """
        return self._foreign.drop(sender)

    def _fail_waiting(self, error: SandboxError) -> None:
        self._local.fail_waiting(error)
        self._foreign.fail_waiting(error)
