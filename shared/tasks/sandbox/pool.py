"""The parent's side of the sandbox: batches over a few workers, blame for hangs, replacement.

This node's local groups and others' never share a process: foreign groups go to a lane of their own
(`foreign`).

A job that is interrupted by another job's hang runs again on the next worker and loses nothing;
only the answer that hung gets reward 0. Jobs behind one that is slow go to other workers, where
there are any. Reasons for which a job fails are those of `TaskError`, `task_mismatch`, and
`scoring_timeout`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shared.cancelling import cancel_and_wait
from shared.contracts.messages import Task, TaskRef
from shared.tasks.derive import TaskError
from shared.tasks.file_rows import held_of
from shared.tasks.sandbox.child import FORKER, NOT_A_REPLY, WORKER, Child, WorkerLost
from shared.tasks.sandbox.foreign import ForeignLane
from shared.tasks.sandbox.jobs import Entry, JobResult, Request, ScoringJob
from shared.tasks.sandbox.protocol import MAX_ANSWERS
from shared.tasks.sandbox.worker_queue import BATCH_CHARS, WorkerQueue
from shared.tasks.verifiers import VerifierChoice

if TYPE_CHECKING:
    from shared.config.sections import TaskSpec, VerifierSection

START_ATTEMPTS = 3
_KILLED_S = 10.0

_log = logging.getLogger(__name__)


class SandboxError(Exception):
    """Workers do not start; the message says what to look at."""


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
        self._answer_timeout_s = answer_timeout_s
        self._memory_bytes = memory_mb * 2**20
        self._count = workers
        self._verifiers = VerifierChoice(tasks)
        self._urgent: deque[Entry] = deque()
        self._others: deque[Entry] = deque()
        self._queues: dict[WorkerQueue, asyncio.Event] = {}
        self._runners: list[asyncio.Task[None]] = []
        self._dispatching = False
        self._foreign_count = foreign_workers
        self._foreign_group_s = foreign_group_s
        self._sources = [[spec.dataset, spec.canonical_config, spec.verifier] for spec in tasks]
        self._rows = held_of(spec.dataset for spec in tasks)
        self._foreign = ForeignLane(foreign_group_s, self._forker, newcomer_share)
        self._foreign_runners: list[asyncio.Task[None]] = []
        self._children: set[Child] = set()
        """All that were started and not seen to end: whoever was to end them may have been
        cancelled before it began.
        """
        self._replaced = 0
        self.missing: dict[str, str] = {}
        """Protections that the system did not give the workers: name (`confine.PROTECTIONS`) to
        cause and remedy.
        """

    @property
    def replaced(self) -> int:
        """Workers that were killed or died, or had grown, and were replaced."""
        return self._replaced + self._foreign.replaced

    async def start(self) -> None:
        """Start the workers and wait until the first batch can be taken.

        Raises:
            SandboxError: workers do not start.
        """
        starts = [*(self._child() for _ in range(self._count)), *(self._forker() for _ in range(self._foreign_count))]
        starting = [asyncio.create_task(start) for start in starts]
        try:
            started = await asyncio.gather(*starting)
        except BaseException:
            # Rarely again: a second time interrupts the wait for a process that is being killed.
            await cancel_and_wait(*starting, again_s=_KILLED_S)
            await self.close()
            raise
        for child in started:
            self.missing |= child.missing
        self._runners = [asyncio.create_task(self._run(child)) for child in started[: self._count]]
        self._foreign_runners = [asyncio.create_task(self._serve_foreign(child)) for child in started[self._count :]]

    async def close(self) -> None:
        """Kill the workers; jobs still waiting fail with SandboxError."""
        await cancel_and_wait(*self._runners, *self._foreign_runners, again_s=_KILLED_S)
        await asyncio.gather(*(child.kill() for child in self._children))
        self._children.clear()
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
            if job.sender is not None:
                if not self._foreign_runners or all(runner.done() for runner in self._foreign_runners):
                    raise SandboxError("no process for foreign groups runs (verifier.foreign_workers)")
                self._foreign.offer(entry)
                continue
            (self._urgent if job.urgent else self._others).append(entry)
        if not self._dispatching:
            # Whoever else asks in this turn of the loop shares the batch.
            self._dispatching = True
            loop.call_soon(self._dispatch)
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
        return await self._started(WORKER, self._answer_timeout_s)

    async def _forker(self) -> Child:
        return await self._started(FORKER, self._foreign_group_s, self._sources)

    async def _started(self, module: str, timeout_s: float, first_frame: Any = None) -> Child:
        cause = ""
        for _ in range(START_ATTEMPTS):
            try:
                child = await Child.start(
                    memory_bytes=self._memory_bytes,
                    answer_timeout_s=timeout_s,
                    verifiers=self._verifiers.names,
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
                    # The rest keeps its place before everything that came later.
                    self._return(queue.lose(lost))
                    self._dispatch()
                    self._replaced += 1
                    queue = WorkerQueue(await self._child())
        except SandboxError as error:
            if len(self._runners) == 1 or all(runner.done() for runner in self._runners if runner is not asyncio.current_task()):
                self._fail_waiting(error)
            raise
        finally:
            self._queues.pop(queue, None)
            for entry in queue.release():
                entry.request.fail(SandboxError("the sandbox was closed"))
            await queue.child.kill()

    async def _loss(self, queue: WorkerQueue, error: Exception) -> WorkerLost:
        """As what a runner takes its exception: of a worker that is lost, whatever it was, so that
        the next can be started.
        """
        if isinstance(error, WorkerLost):
            return error
        _log.error("a worker is started again", exc_info=error)
        await queue.child.kill()
        return WorkerLost(f"failed ({type(error).__name__})", None)

    async def _serve_foreign(self, child: Child) -> None:
        try:
            while True:
                try:
                    await self._foreign.serve(child, SandboxError("the sandbox was closed"))
                except SandboxError:
                    raise
                except Exception:
                    # `serve` has failed the group at work and ended its process; the lane goes on.
                    self._replaced += 1
                    _log.exception("a process for foreign groups is started again")
                    child = await self._forker()
        except SandboxError as error:
            if all(runner.done() for runner in self._foreign_runners if runner is not asyncio.current_task()):
                self._foreign.fail_waiting(error)
            raise

    async def _serve(self, queue: WorkerQueue, woken: asyncio.Event) -> None:
        while True:
            if queue.idle:
                woken.clear()
                await woken.wait()
            results = await queue.child.results(partial(self._relieve, queue))
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
        """Send what waits to workers that have room, the idle ones first."""
        self._dispatching = False
        if not self._urgent and not self._others:
            return
        for queue in sorted(self._queues, key=lambda queue: not queue.idle):
            while queue.room and (batch := self._next_batch(queue.room)):
                queue.send(batch, time.monotonic())
                self._queues[queue].set()

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

    def _relieve(self, queue: WorkerQueue, step: tuple[int, int]) -> None:
        """Let other workers do what a slow job holds up. Should it come back in time, what is done
        twice counts once.
        """
        others = [other for other in self._queues if other is not queue]
        if others:
            queue.stall()
            waiting = queue.besides(step[0])
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
        self._foreign.fail_waiting(error)
