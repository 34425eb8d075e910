"""The sandbox's jobs, their results, and the bookkeeping between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from shared.contracts.messages import Task, TaskRef
from shared.environment_files import is_environment
from shared.reward_files import Replies, Requests
from shared.rewards import Mark
from shared.tasks.prompt import Content, content, task_of
from shared.tasks.sandbox.protocol import Asking, BrokenReply, Failed, ForeignResult, Rewarded, checked, printable
from shared.text import visible_lines

_FIRST_CAUSE = int(Mark.RAISED)


class ScoringJob(Struct, frozen=True, kw_only=True):
    """Score `texts` on the task that `ref` derives to; a text of several turns is a list of them.

    `expected`: the job fails with `task_mismatch` if the derived task differs from it. Urgent jobs
    are done first. `sender`: the key of the node that sent the group; None for this node's own
    work. A foreign group is scored in a process of its own within a deadline, and fails with
    `scoring_timeout` after it. `established`: whether that key has earned a whole share.
    `size_bytes`: memory that the group takes while it waits. `replies`: a judge's, in the order of
    `JobResult.requests`; None while it has not been asked.
    """

    ref: TaskRef
    texts: Sequence[str | Sequence[str]] = ()
    expected: Task | None = None
    want_task: bool = False
    urgent: bool = False
    sender: str | None = None
    established: bool = True
    size_bytes: int = 0
    replies: Sequence[Sequence[Replies]] | None = None


class JobResult(Struct, frozen=True):
    """Rewards in the order of the texts, None where unknown, and what else is known about each
    (`marks`); or the reason why there are none, with a sentence as `detail`. Of a local group with
    rewards, `detail` is what the scorer raised, or returned that is no number, for the first such
    answer.

    `timeouts` counts answers at which a worker was lost; `deaths` counts those of them at which it
    died instead of hanging. `cpu_s`: CPU seconds that a foreign group took, whatever the outcome.
    `parts`: of several rewards, the own values of each for a local group, by its name. `requests`:
    what to ask a judge first; there are no rewards yet. `said`: what the source's environment said
    to the turns of each answer; one of which the last turn has a reply goes on. `printed`: the
    beginning of what the scorer printed at a local group, or before at its import.
    """

    rewards: list[float | None]
    task: Task | None
    reason: str | None
    detail: str
    timeouts: int
    seconds: float
    deaths: int = 0
    cpu_s: float = 0.0
    marks: list[Mark] = []
    parts: dict[str, list[float | None]] = {}
    requests: Sequence[Sequence[Requests]] = ()
    said: list[list[str]] = []
    printed: str = ""


class JobBatch:
    """The jobs of one call of `ScorerPool.run`; `done` is set when the last result is there."""

    __slots__ = ("done", "missing", "results")

    def __init__(self, count: int, done: asyncio.Future[None]) -> None:
        self.done = done
        self.missing = count
        self.results: list[JobResult | None] = [None] * count

    def put(self, place: int, result: JobResult) -> None:
        self.results[place] = result
        self.missing -= 1
        if self.missing == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Entry:
    """A job in progress. `charged_s`: seconds that it occupied processes that were then lost."""

    __slots__ = (
        "charged_s",
        "chars",
        "died",
        "finished",
        "hung",
        "job",
        "losses",
        "place",
        "request",
        "started_s",
        "verifier",
    )

    def __init__(self, job: ScoringJob, verifier: str, request: JobBatch, place: int) -> None:
        self.job = job
        self.verifier = verifier
        self.request = request
        self.place = place
        self.chars = sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in job.texts)
        self.hung: set[int] = set()
        self.died: set[int] = set()
        self.losses = 0
        self.charged_s = 0.0
        self.started_s = 0.0
        self.finished = False

    @property
    def over(self) -> bool:
        """Check whether nobody waits for the result any more."""
        return self.finished or self.request.done.done()

    def packed(self) -> list[Any]:
        """The job as it is sent to a worker, without the answers that hung."""
        job, ref, expected = self.job, self.job.ref, self.job.expected
        texts = [None if place in self.hung else text for place, text in enumerate(job.texts)] if self.hung else list(job.texts)
        task = None if expected is None else content(expected)
        packed = [ref.dataset, ref.config, ref.seed, ref.index, task, self.verifier, texts, job.want_task]
        return packed if job.replies is None else [*packed, job.replies]

    def take(self, result: list[Any]) -> None:
        """Store a worker's result.

        Raises:
            BrokenReply: the result has the wrong form; the job is unchanged.
        """
        if isinstance(result[0], str):
            failed: Failed = checked(result, Failed)
            reason, detail = failed
            self.finish([], None, reason, detail)
            return
        if result[0] is None:
            self._ask(checked(result, Asking))
            return
        rewarded: Rewarded = checked(result, Rewarded)
        self._expect(rewarded.rewards, rewarded.marks)
        self._expect_said(rewarded.rewards, rewarded.said)
        if any(len(values) != len(self.job.texts) for values in rewarded.parts.values()):
            raise BrokenReply("a reward without a value for each answer")
        for place in self.hung:
            rewarded.marks[place] = Mark.KILLED if place in self.died else Mark.TIMEOUT
        if self.hung and self.hung == self.died:
            # A reward that is called with a group lost all of it to the answer at which it died.
            rewarded.marks[:] = [Mark.KILLED if mark is Mark.TIMEOUT else mark for mark in rewarded.marks]
        detail = printable(rewarded.raised) if rewarded.raised else ""
        self.finish(
            rewarded.rewards,
            self._task(rewarded.task),
            detail=detail,
            marks=rewarded.marks,
            parts=rewarded.parts,
            said=rewarded.said,
            printed=visible_lines(rewarded.printed.strip("\n")),
        )

    def _ask(self, asking: Asking) -> None:
        _, requests, derived, raised = asking
        if self.job.replies is not None or any(len(each) != len(self.job.texts) for each in requests):
            raise BrokenReply("requests that do not fit the answers")
        for place in self.hung:
            for each in requests:
                each[place] = Mark.KILLED if place in self.died else Mark.TIMEOUT
        seconds = time.monotonic() - self.started_s
        lost = len(self.hung), seconds, len(self.died), self.charged_s
        self._settle(JobResult([], self._task(derived), None, printable(raised), *lost, requests=requests))

    def take_foreign(self, result: list[Any]) -> None:
        """Store a forker's result (`shared.tasks.sandbox.forker`).

        Raises:
            BrokenReply: the result has the wrong form; the job is unchanged.
        """
        answered: ForeignResult = checked(result, ForeignResult)
        reason, detail, rewards, marks, derived, said, cpu_s, lost, died = answered
        if reason is None:
            self._expect(rewards, marks)
            self._expect_said(rewards, said)
        else:
            marks = []
        task = self._task(derived)
        cpu_s += self.charged_s
        seconds = time.monotonic() - self.started_s
        self._settle(JobResult(rewards, task, reason, detail, lost, seconds, died, cpu_s, marks, said=said))

    def finish(
        self,
        rewards: list[float | None],
        task: Task | None,
        reason: str | None = None,
        detail: str = "",
        marks: list[Mark] | None = None,
        parts: dict[str, list[float | None]] | None = None,
        said: list[list[str]] | None = None,
        printed: str = "",
    ) -> None:
        """Settle the job. Only the first call counts."""
        seconds = time.monotonic() - self.started_s if self.started_s else 0.0
        lost, died = len(self.hung), len(self.died)
        known = JobResult(rewards, task, reason, detail, lost, seconds, died, self.charged_s, marks or [], parts or {})
        self._settle(structs.replace(known, said=said or [], printed=printed) if said or printed else known)

    def _expect(self, rewards: list[float | None], marks: list[Mark]) -> None:
        """Require one reward and one mark for each answer, and a cause for each unknown reward."""
        if not len(rewards) == len(marks) == len(self.job.texts):
            raise BrokenReply(f"{len(rewards)} rewards and {len(marks)} marks for {len(self.job.texts)} answers")
        if None not in rewards and max(marks, default=0) < _FIRST_CAUSE:
            return
        if any((reward is None) != bool(mark.cause) for reward, mark in zip(rewards, marks, strict=True)):
            raise BrokenReply("an unknown reward without a cause")

    def _expect_said(self, rewards: list[float | None], said: list[list[str]]) -> None:
        """Require of an environment that was played what it said to each answer with a reward, and
        of no other scorer.
        """
        plays = is_environment(self.verifier) and bool(said or None not in rewards)
        if len(said) != (len(self.job.texts) if plays else 0):
            raise BrokenReply(f"what was said to {len(said)} answers of {len(self.job.texts)}")

    def _task(self, derived: Content | None) -> Task | None:
        try:
            return None if derived is None else task_of(self.job.ref, derived)
        except ValueError as error:
            raise BrokenReply(printable(str(error))) from None

    def _settle(self, result: JobResult) -> None:
        if not self.finished:
            self.finished = True
            self.request.put(self.place, result)
