"""What is asked of the sandbox, what comes back, and the bookkeeping in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from shared.messages import Task, TaskRef


class ScoringJob(Struct, frozen=True, kw_only=True):
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


class JobResult(Struct, frozen=True):
    """Rewards in the order of the texts, or the reason why there are none.

    `timeouts` counts answers at which a worker was lost (reward 0), `deaths` those of them at which it died instead of hanging.
    """

    rewards: list[float]
    task: Task | None
    reason: str | None
    detail: str
    timeouts: int
    seconds: float
    deaths: int = 0


class Request:
    """The jobs of one call of `ScorerPool.run`; `done` is set when the last has its result."""

    __slots__ = ("done", "missing", "results")

    def __init__(self, count: int, done: asyncio.Future[None]) -> None:
        self.done = done
        self.missing = count
        self.results: list[JobResult | None] = [None] * count

    def put(self, place: int, result: JobResult) -> None:
        """Take a job's result."""
        self.results[place] = result
        self.missing -= 1
        if self.missing == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """Give the whole call up."""
        if not self.done.done():
            self.done.set_exception(error)


class Entry:
    """A job on its way. `held` counts the places that hold it: the queue, and workers that it was sent to."""

    __slots__ = ("chars", "died", "finished", "held", "hung", "job", "losses", "place", "request", "started_s", "verifier")

    def __init__(self, job: ScoringJob, verifier: str, request: Request, place: int) -> None:
        self.job = job
        self.verifier = verifier
        self.request = request
        self.place = place
        self.chars = sum(map(len, job.texts))
        self.held = 0
        self.hung: set[int] = set()
        self.died: set[int] = set()
        self.losses = 0
        self.started_s = 0.0
        self.finished = False

    @property
    def over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.finished or self.request.done.done()

    def packed(self) -> list[Any]:
        """The job as it is sent to a worker, without the answers that hung."""
        job, ref, expected = self.job, self.job.ref, self.job.expected
        texts = [None if place in self.hung else text for place, text in enumerate(job.texts)] if self.hung else list(job.texts)
        task = None if expected is None else [expected.question, expected.answer, expected.metadata]
        return [ref.dataset, ref.config, ref.seed, ref.index, task, self.verifier, texts, job.want_task]

    def take(self, result: list[Any]) -> None:
        """Take what a worker answered."""
        first, second = result
        if isinstance(first, str):
            self.finish([], None, first, second)
        else:
            ref = self.job.ref
            task = None if second is None else Task(ref=ref, question=second[0], answer=second[1], metadata=second[2])
            self.finish(first, task)

    def finish(self, rewards: list[float], task: Task | None, reason: str | None = None, detail: str = "") -> None:
        """Settle the job; the first time counts."""
        if not self.finished:
            self.finished = True
            seconds = time.monotonic() - self.started_s
            self.request.put(self.place, JobResult(rewards, task, reason, detail, len(self.hung), seconds, len(self.died)))
