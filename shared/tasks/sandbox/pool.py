"""The parent's side of the sandbox: sends jobs to workers and returns their results in order.

Local and foreign groups never share a process: local groups go to workers (`local`), foreign ones
to a separate lane (`foreign`), and local groups of a source with `sandbox = false` to one process
outside the sandbox (`outside`), which no foreign text reaches. Where a reward asks a judge, the
pool asks it between two jobs: one that writes the requests, and one that reads the replies. A job
fails for one of the reasons of `TaskError`, for `task_mismatch`, or for `scoring_timeout`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from shared.cancelling import cancel_and_wait, together
from shared.contracts.messages import Task
from shared.reward_files import Replies
from shared.rewards import Mark
from shared.runtime.exits import FatalError
from shared.tasks.derive import TaskError
from shared.tasks.sandbox.child import NOT_A_REPLY, Child, Processes, SandboxError, WorkerLost
from shared.tasks.sandbox.foreign import ForeignLane
from shared.tasks.sandbox.jobs import Entry, JobBatch, JobResult, ScoringJob
from shared.tasks.sandbox.protocol import DERIVING, MAX_ANSWERS, BrokenReply
from shared.tasks.verifiers import VerifierChoice

if TYPE_CHECKING:
    from shared.config.task_sections import JudgeSection, TaskSpec
    from shared.config.verifier_section import VerifierSection
    from shared.tasks.judging import Judge

_KILLED_S = 10.0
NO_JUDGE = "no judge is named: set judge in its [[tasks]] entry"


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
        self._judges: dict[JudgeSection, Judge] = {}
        self._judge_settings = {spec.judge for spec in tasks if spec.judge.url}
        self._processes = Processes(
            answer_timeout_s=answer_timeout_s,
            foreign_group_s=foreign_group_s,
            memory_bytes=memory_mb * 2**20,
            tasks=tasks,
            verifiers=self._verifiers,
        )
        self._local = LocalLane(self._processes.worker, self._fail_waiting)
        self._outside = LocalLane(self._processes.outside, self._fail_waiting)
        self._foreign = ForeignLane(foreign_group_s, self._processes.forker, newcomer_share)
        self.missing: dict[str, str] = {}
        """Protections that the system did not give the workers, by name (`confinement`),
        with cause and remedy.
        """

    @property
    def replaced(self) -> int:
        """Number of workers that were killed, died, or had grown too large, and were replaced."""
        return self._local.replaced + self._outside.replaced + self._foreign.replaced

    async def start(self) -> None:
        """Start the workers and wait until they can take the first batch.

        Raises:
            SandboxError: workers do not start, or the key of a judge cannot be read.
        """
        if self._judge_settings:
            from shared.tasks.judging import Judge

            try:
                self._judges = {settings: Judge(settings) for settings in self._judge_settings}
            except FatalError as error:
                raise SandboxError(str(error)) from None
        # One outside: a model on a GPU is loaded once.
        outside = [self._processes.outside] if self._verifiers.names_outside else []
        kinds = [self._processes.worker] * self._workers + outside + [self._processes.forker] * self._foreign_workers
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
        self._outside.begin(started[self._workers :][: len(outside)])
        self._foreign.begin(started[self._workers + len(outside) :])

    async def close(self) -> None:
        """Kill the workers. Jobs that still wait fail with SandboxError."""
        await cancel_and_wait(*self._local.runners, *self._outside.runners, *self._foreign.runners, again_s=_KILLED_S)
        await self._processes.kill()
        for judge in self._judges.values():
            await judge.close()
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

    async def score(self, groups: Sequence[tuple[Task, Sequence[str | Sequence[str]]]]) -> list[JobResult]:
        """The rewards of the answers (as in `ScoringJob`) to each of this node's own tasks, in the
        order of `groups`.

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
        request = JobBatch(len(jobs), asyncio.get_running_loop().create_future())
        name_for = self._verifiers.name_for
        for place, job in enumerate(jobs):
            if len(job.texts) > MAX_ANSWERS:
                raise ValueError(f"{len(job.texts)} answers to one task: {MAX_ANSWERS} at most")
            entry = Entry(job, name_for(job.ref), request, place)
            is_outside = self._verifiers.is_outside(job.ref)
            if job.sender is not None:
                if is_outside:
                    raise ValueError(f"{job.ref.dataset}: a group of another node is never scored outside the sandbox")
                if not self._foreign.running:
                    raise SandboxError("no process for foreign groups runs")
                self._foreign.offer(entry)
            elif is_outside:
                if not self._outside.running:
                    raise SandboxError("the process of a reward with sandbox = false does not start again")
                self._outside.offer(entry)
            else:
                self._local.offer(entry)
        for lane in (self._local, self._outside):
            lane.dispatch_soon()
        await request.done
        results = [result for result in request.results if result is not None]
        if not any(result.requests for result in results):
            return results
        return await together(*(self._judged(job, result) for job, result in zip(jobs, results, strict=True)))

    async def _judged(self, job: ScoringJob, asking: JobResult) -> JobResult:
        """Ask the judge of the task's source, and score with its replies."""
        if not asking.requests:
            return asking
        began_s = time.monotonic()
        spec = self._verifiers.spec_for(job.ref)
        judge = self._judges.get(spec.judge) if spec is not None else None
        replies: list[list[Replies]]
        if judge is None:
            replies = [[each if isinstance(each, int) else [None] * len(each) for each in of_part] for of_part in asking.requests]
        else:
            replies = await judge.replies(asking.requests)
        asked_s = time.monotonic() - began_s
        (result,) = await self.run([structs.replace(job, replies=replies)])
        problem = judge.problem if judge is not None else NO_JUDGE
        return structs.replace(
            result,
            task=result.task or asking.task,
            detail=result.detail or asking.detail or (problem if Mark.NO_VERDICT in result.marks else ""),
            timeouts=result.timeouts + asking.timeouts,
            deaths=result.deaths + asking.deaths,
            seconds=result.seconds + asking.seconds + asked_s,
        )

    @property
    def judges(self) -> Collection[Judge]:
        """The judges that are asked; empty before `start`."""
        return self._judges.values()

    def foreign_senders(self) -> list[str]:
        return self._foreign.senders()

    def drop(self, sender: str) -> int:
        """Give up a sender's groups that are waiting or in progress, with the reason `dropped`.
        Returns their number.
        """
        return self._foreign.drop(sender)

    def _fail_waiting(self, error: SandboxError) -> None:
        self._local.fail_waiting(error)
        self._outside.fail_waiting(error)
        self._foreign.fail_waiting(error)


# The parent's side of local groups: distributes batches among a few workers, finds the answer to
# blame for a hang, and replaces workers.
#
# A job interrupted by another job's hang runs again on the next worker and loses nothing; only the
# reward of the answer that hung is unknown.


_log = logging.getLogger(__name__)


class LocalLane:
    """Local jobs in progress, and the workers that score them."""

    def __init__(self, start_child: Callable[[], Awaitable[Child]], on_end: Callable[[SandboxError], None]) -> None:
        """`start_child` starts a worker. `on_end` is called with the reason when the last worker
        cannot be replaced.
        """
        self._start_child = start_child
        self._on_end = on_end
        self._waiting = WaitingJobs()
        self._queues: dict[WorkerQueue, asyncio.Event] = {}
        self._dispatching = False
        self.runners: list[asyncio.Task[None]] = []
        """One task per worker. It ends when it is cancelled or cannot start another worker."""
        self.replaced = 0
        """Number of workers that were lost or had grown too large, and were replaced."""

    @property
    def running(self) -> bool:
        return not all(runner.done() for runner in self.runners)

    def begin(self, children: Iterable[Child]) -> None:
        self.runners = [asyncio.create_task(self._run(child)) for child in children]

    def offer(self, entry: Entry) -> None:
        self._waiting.add(entry)

    def dispatch_soon(self) -> None:
        """Send waiting jobs at the end of this iteration of the event loop, so that all callers of
        this iteration share a batch.
        """
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def fail_waiting(self, error: Exception) -> None:
        self._waiting.fail(error)

    async def _run(self, child: Child) -> None:
        queue, woken = WorkerQueue(child), asyncio.Event()
        try:
            while True:
                self._queues[queue] = woken
                self._dispatch()
                try:
                    await self._serve(queue, woken)
                except Exception as error:
                    lost = await self._loss(queue, error)
                    del self._queues[queue]
                    # The remaining jobs stay ahead of everything that came later.
                    self._waiting.put_back(queue.lose(lost))
                    self._dispatch()
                    self.replaced += 1
                    queue = WorkerQueue(await self._start_child())
        except SandboxError as error:
            if all(runner.done() for runner in self.runners if runner is not asyncio.current_task()):
                self._on_end(error)
            raise
        finally:
            self._queues.pop(queue, None)
            for entry in queue.release():
                entry.request.fail(SandboxError("the sandbox was closed"))
            await queue.child.kill()

    async def _loss(self, queue: WorkerQueue, error: Exception) -> WorkerLost:
        """Whatever exception a runner raised, its worker counts as lost, so that the next one can
        be started.
        """
        if isinstance(error, WorkerLost):
            return error
        _log.error("a worker is started again", exc_info=error)
        await queue.child.kill()
        return WorkerLost(f"failed ({type(error).__name__})", None)

    async def _serve(self, queue: WorkerQueue, woken: asyncio.Event) -> None:
        """Runs until the worker is lost because it hangs or sends an invalid reply, or until it has
        grown too large. A worker that has grown gets no more jobs, and is replaced once it has
        answered those it has.
        """
        while True:
            if queue.idle:
                woken.clear()
                await woken.wait()
            results = await queue.child.results()
            try:
                queue.take(results, time.monotonic())
            except (ValueError, TypeError, LookupError) as error:
                await queue.child.kill()
                raise WorkerLost(f"{NOT_A_REPLY} ({error})", None) from None
            if queue.child.has_grown:
                queue.stall()
                if queue.idle:
                    await queue.child.kill()
                    raise WorkerLost("grew", None)
            self._dispatch()

    def _dispatch(self) -> None:
        """Send waiting jobs to workers with room, idle ones first."""
        self._dispatching = False
        if not self._waiting:
            return
        for queue in sorted(self._queues, key=lambda queue: not queue.idle):
            while queue.room and (batch := self._waiting.next_batch(queue.room)):
                queue.send(batch, time.monotonic())
                self._queues[queue].set()


# The jobs sent to one worker, in order, and how many to send at a time. Pure bookkeeping.


FIRST_BATCH_JOBS = 4
MAX_BATCH_JOBS = 128
BATCH_CHARS = 4_000_000
BATCH_S = 0.02
"""Target duration of a batch: long enough to keep the overhead small, short enough to delay few
jobs when one hangs.
"""
BATCHES_IN_WORK = 2
UNEXPLAINED_LOSSES = 3


class WorkerQueue:
    """A worker and the jobs that were sent to it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._entries: deque[Entry] = deque()
        self._first = 0
        self._batches: deque[tuple[int, int]] = deque()
        self._batch_jobs = FIRST_BATCH_JOBS
        self._busy_since_s = 0.0
        self._stalled = False

    @property
    def idle(self) -> bool:
        return not self._entries

    @property
    def room(self) -> int:
        return self._batch_jobs if len(self._batches) < BATCHES_IN_WORK and not self._stalled else 0

    def stall(self) -> None:
        """Send it nothing more until it has finished something."""
        self._stalled = True

    def send(self, batch: list[Entry], now_s: float) -> None:
        if not self._entries:
            self._busy_since_s = now_s
        for entry in batch:
            entry.started_s = entry.started_s or now_s
        self._entries.extend(batch)
        self._batches.append((self._first + len(self._entries), len(batch)))
        self.child.send([entry.packed() for entry in batch])

    def take(self, results: list[list[Any]], now_s: float) -> None:
        """Settle the oldest jobs, and adapt the batch size to finished batches.

        Raises:
            BrokenReply: a result has the wrong form; its job and those behind it are unchanged.
        """
        self._stalled = False
        for result in results:
            if not self._entries:
                raise BrokenReply("more results than jobs")
            self._entries[0].take(result)
            self._entries.popleft()
        self._first += len(results)
        while self._batches and self._batches[0][0] <= self._first:
            _, jobs = self._batches.popleft()
            fitting = int(BATCH_S * jobs / max(1e-9, now_s - self._busy_since_s))
            self._batch_jobs = max(1, self._batch_jobs // 2, min(fitting, 2 * self._batch_jobs, MAX_BATCH_JOBS))
            self._busy_since_s = now_s

    def lose(self, lost: WorkerLost) -> list[Entry]:
        """Blame the job that the worker was working on. Returns the unsettled jobs in order."""
        entries = self.release()
        guilty = entries[lost.step[0] - self._first] if lost.step and 0 <= lost.step[0] - self._first < len(entries) else None
        if lost.step is None or guilty is None:
            _blame_nobody(entries, lost)
        else:
            _blame(guilty, lost.step[1], lost)
        return [entry for entry in entries if not entry.over]

    def release(self) -> list[Entry]:
        entries = list(self._entries)
        self._entries.clear()
        return entries


def _blame_nobody(entries: list[Entry], lost: WorkerLost) -> None:
    # The worker died between jobs, so no job is known to be the cause. Counting losses for each of
    # them ensures that none is retried for ever.
    for entry in entries:
        entry.losses += 1
        if entry.losses >= UNEXPLAINED_LOSSES:
            entry.finish([], None, "scoring_timeout", f"its worker {lost} {entry.losses} times")


def _blame(guilty: Entry, step: int, lost: WorkerLost) -> None:
    if step == DERIVING:
        guilty.finish([], None, "scoring_timeout", f"{guilty.job.ref.dataset}: deriving the task: worker {lost}")
        return
    if not lost.hung and step - 1 not in guilty.hung:
        guilty.died.add(step - 1)
    guilty.hung.add(step - 1)


# Local jobs that wait for a worker: urgent ones first, each kind in order.


class WaitingJobs:
    """Two queues of jobs. False when both are empty."""

    def __init__(self) -> None:
        self._urgent: deque[Entry] = deque()
        self._others: deque[Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self._urgent or self._others)

    def add(self, entry: Entry) -> None:
        self._line_of(entry).append(entry)

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Put jobs back, in their order, ahead of everything that came later."""
        for entry in reversed(entries):
            self._line_of(entry).appendleft(entry)

    def next_batch(self, room: int) -> list[Entry]:
        """Take at most `room` jobs; fewer if their texts are long (`BATCH_CHARS`)."""
        batch: list[Entry] = []
        chars = 0
        for line in (self._urgent, self._others):
            while line and len(batch) < room and chars < BATCH_CHARS:
                entry = line.popleft()
                if not entry.over:
                    batch.append(entry)
                    chars += entry.chars
        return batch

    def fail(self, error: Exception) -> None:
        for line in (self._urgent, self._others):
            while line:
                line.popleft().request.fail(error)

    def _line_of(self, entry: Entry) -> deque[Entry]:
        return self._urgent if entry.job.urgent else self._others
