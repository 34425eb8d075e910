"""The parent's side of the sandbox: batches over a few workers, blame for hangs, replacement.

A job that is interrupted by another job's hang runs again on the next worker and loses nothing; only the answer that hung gets
reward 0. Reasons for which a job fails are those of `TaskError`, `task_mismatch`, and `scoring_timeout`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared.messages import Task, TaskRef
from shared.tasks.derive import TaskError
from shared.tasks.sandbox.child import Child, WorkerLost
from shared.tasks.sandbox.protocol import DERIVING, task_digest

if TYPE_CHECKING:
    from shared.config.sections import VerifierSection

BATCH_JOBS = 32
BATCH_CHARS = 4_000_000
START_ATTEMPTS = 3
UNEXPLAINED_LOSSES = 3


class SandboxError(Exception):
    """Workers do not start; the message says what to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringJob:
    """Score `texts` on the task that `ref` derives to.

    `expected`: the job fails with `task_mismatch` when the derived task differs from it. `max_timeouts`: it fails with
    `scoring_timeout` when more answers than that hang; None lets each cost its time. Urgent jobs go before the others.
    """

    ref: TaskRef
    texts: Sequence[str] = ()
    expected: Task | None = None
    want_task: bool = False
    max_timeouts: int | None = None
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class JobResult:
    """Rewards in the order of the texts, or the reason why there are none. `timeouts` counts answers that hung (reward 0)."""

    rewards: list[float]
    task: Task | None
    reason: str | None
    detail: str
    timeouts: int
    seconds: float


@dataclass(slots=True)
class _Entry:
    job: ScoringJob
    done: asyncio.Future[JobResult]
    digest: bytes | None
    hung: set[int] = field(default_factory=set)
    losses: int = 0
    started_s: float = 0.0

    @property
    def chars(self) -> int:
        return sum(map(len, self.job.texts))

    def request(self) -> list[object]:
        ref = self.job.ref
        texts = [None if place in self.hung else text for place, text in enumerate(self.job.texts)]
        return [ref.dataset, ref.config, ref.seed, ref.index, self.digest, texts, self.job.want_task]

    def finish(self, rewards: list[float], task: Task | None, reason: str | None = None, detail: str = "") -> None:
        if not self.done.done():
            seconds = time.monotonic() - self.started_s
            self.done.set_result(JobResult(rewards, task, reason, detail, len(self.hung), seconds))


class ScorerPool:
    """A pool of workers. `start` before use, `close` kills them; or `async with`."""

    def __init__(self, *, workers: int, answer_timeout_s: float, memory_mb: int) -> None:
        """`answer_timeout_s`: wall clock for one answer, and for deriving one task. `memory_mb`: address space of a worker."""
        self._answer_timeout_s = answer_timeout_s
        self._memory_bytes = memory_mb * 2**20
        self._count = workers
        self._waiting: asyncio.PriorityQueue[tuple[int, int, _Entry]] = asyncio.PriorityQueue()
        self._order = itertools.count()
        self._front = itertools.count(-1, -1)
        self._runners: list[asyncio.Task[None]] = []
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
    def from_config(cls, config: VerifierSection, *, workers: int | None = None) -> ScorerPool:
        """A pool as the configuration says; `workers` overrides how many."""
        return cls(workers=workers or config.workers, answer_timeout_s=config.answer_timeout_s, memory_mb=config.worker_memory_mb)

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
        loop = asyncio.get_running_loop()
        entries = [_Entry(job, loop.create_future(), task_digest(job.expected) if job.expected else None) for job in jobs]
        for entry in entries:
            self._waiting.put_nowait((0 if entry.job.urgent else 1, next(self._order), entry))
        return list(await asyncio.gather(*(entry.done for entry in entries)))

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
                return await Child.start(memory_bytes=self._memory_bytes, answer_timeout_s=self._answer_timeout_s)
            except WorkerLost as error:
                cause = str(error)
        raise SandboxError(
            f"scorer processes do not start ({START_ATTEMPTS} attempts, {cause}): "
            "raise verifier.worker_memory_mb, or see standard error for the cause"
        )

    async def _run(self, child: Child) -> None:
        batch: list[_Entry] = []
        try:
            while True:
                batch = await self._next_batch()
                try:
                    await self._serve(child, batch)
                except WorkerLost as lost:
                    self._blame(batch, lost)
                    self._requeue(batch)
                    self.replaced += 1
                    child = await self._child()
        except SandboxError as error:
            self._fail_waiting(error)
            raise
        finally:
            for entry in batch:
                if not entry.done.done():
                    entry.done.set_exception(SandboxError("the sandbox was closed"))
            await child.kill()

    async def _next_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        chars = 0
        while not batch or (len(batch) < BATCH_JOBS and chars < BATCH_CHARS and not self._waiting.empty()):
            entry = (await self._waiting.get())[2]
            if not entry.done.done():
                batch.append(entry)
                chars += entry.chars
        return batch

    async def _serve(self, child: Child, batch: list[_Entry]) -> None:
        now_s = time.monotonic()
        for entry in batch:
            entry.started_s = entry.started_s or now_s
        await child.send([entry.request() for entry in batch])
        for _ in batch:
            position, first, second = await child.result()
            entry = batch[position]
            if isinstance(first, str):
                entry.finish([], None, first, second)
            else:
                entry.finish(first, _task(entry.job.ref, second) if second else None)

    def _blame(self, batch: list[_Entry], lost: WorkerLost) -> None:
        if lost.step is None:
            # It died between jobs: nobody is known to be guilty, and nobody may come back for ever.
            for entry in batch:
                entry.losses += 1
                if entry.losses >= UNEXPLAINED_LOSSES:
                    entry.finish([], None, "scoring_timeout", f"its worker {lost} {entry.losses} times")
            return
        job, answer = lost.step
        guilty = batch[job]
        if answer == DERIVING:
            guilty.finish([], None, "scoring_timeout", f"{guilty.job.ref.dataset}: deriving the task: worker {lost}")
            return
        guilty.hung.add(answer)
        limit = guilty.job.max_timeouts
        if limit is not None and len(guilty.hung) > limit:
            guilty.finish([], None, "scoring_timeout", f"{len(guilty.hung)} answers: worker {lost}")

    def _requeue(self, batch: list[_Entry]) -> None:
        # The rest of the batch keeps its place before everything that came later; the guilty job goes last of it.
        for entry in reversed([entry for entry in batch if not entry.done.done()]):
            self._waiting.put_nowait((0 if entry.job.urgent else 1, next(self._front), entry))

    def _fail_waiting(self, error: SandboxError) -> None:
        with suppress(asyncio.QueueEmpty):
            while True:
                entry = self._waiting.get_nowait()[2]
                if not entry.done.done():
                    entry.done.set_exception(error)


def _task(ref: TaskRef, derived: list[Any]) -> Task:
    question, answer, metadata = derived
    return Task(ref=ref, question=question, answer=answer, metadata=metadata)
