"""The sampler's inputs besides scored groups: the trainer's position, and the newest held-out
result.
"""

from __future__ import annotations

import asyncio

from services.sampler.bandit import Evaluation
from shared.contracts.codec import decode
from shared.contracts.control import EvalReport, TrainerPosition
from shared.contracts.subjects import EVAL_KEY, TRAINER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.runtime.logs import Log
from shared.transport.base import Transport


class Heard:
    """The newest position and evaluation; `news` is set when the trainer has moved."""

    def __init__(self, node_id: str, node: Transport, log: Log) -> None:
        self._bucket, self._node, self._log = node_bucket(node_id), node, log
        self.position: TrainerPosition | None = None
        self.evaluation: Evaluation | None = None
        self.news = asyncio.Event()

    async def follow_trainer(self) -> None:
        """Keep `position` up to date. Never returns."""
        async for entry in self._node.kv.watch(self._bucket, TRAINER_KEY, poll_s=0.5):
            try:
                self.position = decode(entry.value, TrainerPosition)
            except MessageError as error:
                self._log.error("trainer_position_unreadable", reason=str(error), remedy="update the older side")
                continue
            self.news.set()

    async def follow_evaluations(self) -> None:
        """Keep `evaluation` up to date. Never returns."""
        async for entry in self._node.kv.watch(self._bucket, EVAL_KEY, poll_s=0.5):
            self._note_evaluation(entry.value)

    async def read_evaluation(self) -> None:
        """Read the evaluation that already exists."""
        entry = await self._node.kv.get(self._bucket, EVAL_KEY)
        if entry is not None:
            self._note_evaluation(entry.value)

    def _note_evaluation(self, payload: bytes) -> None:
        try:
            report = decode(payload, EvalReport)
        except MessageError as error:
            self._log.error("evaluation_unreadable", reason=str(error), remedy="update the older side")
            return
        self.evaluation = Evaluation.of(report)
