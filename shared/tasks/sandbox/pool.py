"""The parent's side of the sandbox: batches over a few workers, blame for hangs, replacement.

A job that is interrupted by another job's hang runs again on the next worker and loses nothing; only the answer that hung gets
reward 0. Jobs behind one that is slow go to other workers, where there are any. Reasons for which a job fails are those of
`TaskError`, `task_mismatch`, and `scoring_timeout`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from shared.messages import Task, TaskRef
from shared.tasks.derive import TaskError
from shared.tasks.sandbox.child import Child, WorkerLost
from shared.tasks.sandbox.crew import BATCH_CHARS, Crew
from shared.tasks.sandbox.jobs import Entry, JobResult, Request, ScoringJob
from shared.tasks.sandbox.protocol import MAX_ANSWERS
from shared.tasks.verifiers import VerifierChoice

if TYPE_CHECKING:
    from shared.config.sections import TaskSpec, VerifierSection

START_ATTEMPTS = 3


class SandboxError(Exception):
    """Workers do not start; the message says what to look at."""


class ScorerPool:
    """A pool of workers. `start` before use, `close` kills them; or `async with`."""

    def __init__(self, *, workers: int, answer_timeout_s: float, memory_mb: int, tasks: Sequence[TaskSpec] = ()) -> None:
        """`answer_timeout_s`: wall clock for one answer, and for deriving one task. `memory_mb`: address space of a worker.

        `tasks`: this node's sources, which say by which verifier a dataset's answers are judged, also those of other nodes.
        """
        self._answer_timeout_s = answer_timeout_s
        self._memory_bytes = memory_mb * 2**20
        self._count = workers
        self._verifiers = VerifierChoice(tasks)
        self._urgent: deque[Entry] = deque()
        self._others: deque[Entry] = deque()
        self._crews: dict[Crew, asyncio.Event] = {}
        self._runners: list[asyncio.Task[None]] = []
        self._dispatching = False
        self.replaced = 0
        """Workers that were killed or died, and were replaced."""

    async def start(self) -> None:
        """Start the workers and wait until the first batch can be taken.

        Raises:
            SandboxError: workers do not start.
        """
        children = await asyncio.gather(*(self._child() for _ in range(self._count)))
        self._runners = [asyncio.create_task(self._run(child)) for child in children]

    async def close(self) -> None:
        """Kill the workers; jobs still waiting fail with SandboxError."""
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        self._fail_waiting(SandboxError("the sandbox was closed"))

    @classmethod
    def from_config(cls, config: VerifierSection, *, tasks: Sequence[TaskSpec] = (), workers: int | None = None) -> ScorerPool:
        """A pool as the configuration says; `workers` overrides how many. `tasks` as in the constructor."""
        return cls(
            workers=workers or config.workers,
            answer_timeout_s=config.answer_timeout_s,
            memory_mb=config.worker_memory_mb,
            tasks=tasks,
        )

    async def __aenter__(self) -> ScorerPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def score(self, groups: Sequence[tuple[Task, Sequence[str]]]) -> list[list[float]]:
        """Rewards for the completion texts of each of this node's own tasks, in the order of `groups`.

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
        if not self._runners or all(runner.done() for runner in self._runners):
            raise SandboxError("the sandbox is not running")
        if not jobs:
            return []
        loop = asyncio.get_running_loop()
        request = Request(len(jobs), loop.create_future())
        name_for = self._verifiers.name_for
        for place, job in enumerate(jobs):
            if len(job.texts) > MAX_ANSWERS:
                raise ValueError(f"{len(job.texts)} answers to one task: {MAX_ANSWERS} at most")
            entry = Entry(job, name_for(job.ref), request, place)
            entry.held = 1
            (self._urgent if job.urgent else self._others).append(entry)
        if not self._dispatching:
            # Whoever else asks in this turn of the loop shares the batch.
            self._dispatching = True
            loop.call_soon(self._dispatch)
        await request.done
        return [result for result in request.results if result is not None]

    async def derive(self, ref: TaskRef) -> Task:
        """Derive a task from a reference that is not trusted.

        Raises:
            TaskError: as `derive_task`, and for one that takes too long.
        """
        (result,) = await self.run([ScoringJob(ref=ref, want_task=True)])
        if result.task is None:
            raise TaskError(result.reason or "task_underivable", result.detail)
        return result.task

    async def _child(self) -> Child:
        cause = ""
        for _ in range(START_ATTEMPTS):
            try:
                return await Child.start(
                    memory_bytes=self._memory_bytes, answer_timeout_s=self._answer_timeout_s, verifiers=self._verifiers.names
                )
            except WorkerLost as error:
                cause = str(error)
        raise SandboxError(
            f"scorer processes do not start ({START_ATTEMPTS} attempts, {cause}): "
            "raise verifier.worker_memory_mb, or see standard error for the cause"
        )

    async def _run(self, child: Child) -> None:
        crew, woken = Crew(child), asyncio.Event()
        try:
            while True:
                self._crews[crew] = woken
                self._dispatch()
                try:
                    await self._serve(crew, woken)
                except WorkerLost as lost:
                    del self._crews[crew]
                    # The rest keeps its place before everything that came later.
                    self._return(crew.lose(lost))
                    self._dispatch()
                    self.replaced += 1
                    crew = Crew(await self._child())
        except SandboxError as error:
            if len(self._runners) == 1 or all(runner.done() for runner in self._runners if runner is not asyncio.current_task()):
                self._fail_waiting(error)
            raise
        finally:
            self._crews.pop(crew, None)
            for entry in crew.release():
                entry.request.fail(SandboxError("the sandbox was closed"))
            await crew.child.kill()

    async def _serve(self, crew: Crew, woken: asyncio.Event) -> None:
        while True:
            if crew.idle:
                woken.clear()
                await woken.wait()
            results = await crew.child.results(partial(self._relieve, crew))
            crew.take(results, time.monotonic())
            self._dispatch()

    def _dispatch(self) -> None:
        """Send what waits to workers that have room, the idle ones first."""
        self._dispatching = False
        if not self._urgent and not self._others:
            return
        for crew in sorted(self._crews, key=lambda crew: not crew.idle):
            while crew.room and (batch := self._next_batch(crew.room)):
                crew.send(batch, time.monotonic())
                self._crews[crew].set()

    def _next_batch(self, room: int) -> list[Entry]:
        batch: list[Entry] = []
        chars = 0
        for queue in (self._urgent, self._others):
            while queue and len(batch) < room and chars < BATCH_CHARS:
                entry = queue.popleft()
                if entry.over:
                    entry.held -= 1
                else:
                    batch.append(entry)
                    chars += entry.chars
        return batch

    def _relieve(self, crew: Crew, step: tuple[int, int]) -> None:
        """Let other workers do what a slow job holds up. Should it come back in time, what is done twice counts once."""
        others = [other for other in self._crews if other is not crew]
        if others:
            waiting = crew.besides(step[0])
            for entry in waiting:
                entry.held += 1
            self._return(waiting)
            self._dispatch()

    def _return(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            entry.held = max(1, entry.held)
            (self._urgent if entry.job.urgent else self._others).appendleft(entry)

    def _fail_waiting(self, error: SandboxError) -> None:
        for queue in (self._urgent, self._others):
            while queue:
                queue.popleft().request.fail(error)
