"""Runs one training step on the device: alone if generator and trainer share it in turns, and with
a remedy if its memory is too small.
"""

from __future__ import annotations

import asyncio

import torch

from services.trainer.learner import Learner
from services.trainer.records import StepRecord
from services.trainer.torch_thread import TorchThread
from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.device_turns import TurnError, device_turns
from shared.runtime import FatalError, unless_stopped


class DeviceStep:
    """Trains batches one by one in the compute thread."""

    def __init__(self, config: NodeConfig, learner: Learner, worker: TorchThread, stopping: asyncio.Event) -> None:
        self._learner, self._torch, self._stopping = learner, worker, stopping
        self._turns = device_turns(config, "trainer")

    async def train(self, batch: Batch) -> tuple[StepRecord, float] | None:
        """The step's record and the seconds waited for a turn on the device. None if the service is
        stopped before the turn comes.

        Raises:
            FatalError: the step does not fit into the device's memory, no turn can be had, or an
                installed objective's loss cannot be used.
            RuntimeError: it does not fit now, but may once another process has freed its memory.
        """
        try:
            return await self._in_turn(batch)
        except torch.OutOfMemoryError as error:
            problem = f"step {batch.number} does not fit into the device's memory ({str(error).splitlines()[0]})"
            remedy = "lower trainer.token_budget, or set trainer.gradient_checkpointing or trainer.lora.rank"
            if self._turns is not None:
                # A process that was killed during its turn may not have freed its memory yet.
                raise RuntimeError(f"{problem}: trying again from the last checkpoint; if this persists, {remedy}") from error
            raise FatalError(f"{problem}: {remedy}") from None

    async def _in_turn(self, batch: Batch) -> tuple[StepRecord, float] | None:
        if self._turns is None:
            return await self._torch.run(lambda: self._learner.step(batch)), 0.0
        try:
            waited_s = await unless_stopped(self._stopping, self._turns.take())
        except TurnError as error:
            raise FatalError(str(error)) from None
        if waited_s is None:
            return None
        try:
            return await self._torch.run(lambda: self._learner.step(batch)), waited_s
        finally:
            # Release torch's cached memory, which the process with the next turn would lack.
            if torch.cuda.is_available():
                await self._torch.run(torch.cuda.empty_cache)
            self._turns.give_up()
