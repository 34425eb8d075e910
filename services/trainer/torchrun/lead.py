"""Rank 0 of several processes: the trainer service, which leads the other ranks."""

from __future__ import annotations

import asyncio
import os

from services.trainer.learner import Learner
from services.trainer.parallel.group import Place, ProcessLost
from services.trainer.service import TrainerService
from services.trainer.torchrun.leading_learner import Followers, LeadingLearner
from shared.cancelling import StillRunningError, cancel_and_wait
from shared.config import NodeConfig
from shared.runtime import ServiceContext

_BEAT_S = 1.0
_END_S = 3.0


class LeadingTrainer:
    """A `TrainerService` whose learner computes together with other processes. Only this process
    communicates with anything outside.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._followers = Followers(Place.of(os.environ), config)

    async def run(self, context: ServiceContext) -> None:
        """Train until told to stop, like a single process; the other ranks end with it.

        Raises:
            ProcessLost: another process has exited or hangs; all must be started again.
        """
        training = asyncio.create_task(TrainerService(self._config, self._learner).run(context))
        watching = asyncio.create_task(self._watch(context))
        try:
            await asyncio.wait({training, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, training):
                if task.done():
                    task.result()
        except ProcessLost as lost:
            context.log.error("process_lost", reason=str(lost), consequence="this process ends too")
            raise
        finally:
            try:
                await cancel_and_wait(watching, training, patience_s=_END_S)
            except StillRunningError as error:
                context.log.warning("training_goes_on", reason=str(error), consequence="this process ends all the same")
            finally:
                await self._end(context)

    def _learner(self, config: NodeConfig) -> Learner:
        return LeadingLearner(config, self._followers)

    async def _watch(self, context: ServiceContext) -> None:
        """While there is nothing to compute, detect lost processes and react to signals that only
        they received.
        """
        started_by = os.getppid()
        while True:
            await asyncio.sleep(_BEAT_S)
            if os.getppid() != started_by and not context.stopping.is_set():
                context.log.warning("launcher_gone", consequence="stopping: nothing would restart a process that fails")
                context.stopping.set()
            if self._followers.met:
                if await asyncio.to_thread(self._followers.beat):
                    context.stopping.set()
            elif context.stopping.is_set():
                return  # The other ranks were also told to stop, and may no longer answer.

    async def _end(self, context: ServiceContext) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.to_thread(self._followers.end)
        except (ProcessLost, TimeoutError) as error:
            context.log.warning("processes_not_told", reason=str(error), consequence="they end when they notice")
