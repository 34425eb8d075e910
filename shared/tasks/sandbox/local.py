"""The parent's side of local groups: distributes batches among a few workers, finds the answer to
blame for a hang, and replaces workers.

A job interrupted by another job's hang runs again on the next worker and loses nothing; only the
reward of the answer that hung is unknown. Jobs behind a slow one go to other workers, if there are
any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from shared.tasks.sandbox.child import NOT_A_REPLY, Child, WorkerLost
from shared.tasks.sandbox.jobs import Entry
from shared.tasks.sandbox.processes import SandboxError
from shared.tasks.sandbox.waiting import WaitingJobs
from shared.tasks.sandbox.worker_queue import WorkerQueue

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
        """Whether there are workers."""
        return not all(runner.done() for runner in self.runners)

    def begin(self, children: Iterable[Child]) -> None:
        """Score in these workers, and in their replacements, until the runners end."""
        self.runners = [asyncio.create_task(self._run(child)) for child in children]

    def offer(self, entry: Entry) -> None:
        """Add a job to the line; `dispatch_soon` sends it."""
        self._waiting.add(entry)

    def dispatch_soon(self) -> None:
        """Send waiting jobs at the end of this iteration of the event loop, so that all callers of
        this iteration share a batch.
        """
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def fail_waiting(self, error: Exception) -> None:
        """Fail everything that waits."""
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
        """Send waiting jobs to workers with room, idle ones first."""
        self._dispatching = False
        if not self._waiting:
            return
        for queue in sorted(self._queues, key=lambda queue: not queue.idle):
            while queue.room and (batch := self._waiting.next_batch(queue.room)):
                queue.send(batch, time.monotonic())
                self._queues[queue].set()

    def _relieve(self, queue: WorkerQueue, step: tuple[int, int]) -> None:
        """Give the jobs that wait behind a slow one to other workers. If the slow job finishes in
        time after all, a job that was done twice counts once.
        """
        others = [other for other in self._queues if other is not queue]
        if others:
            queue.stall()
            waiting = queue.besides(step[0])
            for entry in waiting:
                entry.held += 1
            self._waiting.put_back(waiting)
            self._dispatch()
