"""Decides when checkpoints are written and what is deleted afterwards, and calls the store
alongside the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.trainer.durable.batch_log import BatchLog
from services.trainer.durable.checkpoint import CheckpointStore, TrainedModel
from services.trainer.durable.export import CHECKPOINTS
from services.trainer.figures import TrainerGauges
from services.trainer.learner import Learner
from services.trainer.state import TrainedPosition
from services.trainer.torch_thread import TorchThread
from shared.config import NodeConfig
from shared.contracts.codec import decode
from shared.contracts.control import EvalReport
from shared.contracts.subjects import EVAL_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.runtime import ServiceContext
from shared.transport.base import TransportError


class CheckpointKeeper:
    """Writes a trainer's checkpoints. If one cannot be written, it is tried again; the previous one
    stays intact.

    failing: the newest could not be written. written: the batch of the newest one on disk. seconds:
    time spent writing since `step_seconds` was last called.
    """

    def __init__(
        self,
        config: NodeConfig,
        context: ServiceContext,
        learner: Learner,
        gauges: TrainerGauges,
        batches: BatchLog,
        worker: TorchThread,
    ) -> None:
        trainer = config.trainer
        self._config, self._context, self._log = config, context, context.log
        self._learner, self._gauges, self._batches, self._torch = learner, gauges, batches, worker
        folder = config.node.run_dir / CHECKPOINTS
        self.store = CheckpointStore(folder, keep=trainer.keep_checkpoints, keep_best=trainer.keep_best)
        self.written = 0
        self.failing = False
        self._seconds = 0.0

    def step_seconds(self) -> float:
        """Seconds spent on checkpoints since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def due(self, step: int) -> bool:
        """Whether to write a checkpoint after `step`: it is due, the last one could not be written,
        or the log could discard batches that no checkpoint contains.
        """
        return self.failing or self._batches.wants_checkpoint or step % self._config.trainer.checkpoint_every == 0

    @property
    def holds_up(self) -> bool:
        """Whether training must wait until a checkpoint can be written, because a trainer that
        continued could not be restarted.
        """
        return self.failing and self._batches.wants_checkpoint

    async def write(self, position: TrainedPosition, failed: Callable[[str, str, Exception], None]) -> None:
        """Write a checkpoint of the state after `position`; calls `failed(kind, remedy, error)` if
        it cannot be written.
        """
        started = time.perf_counter()
        in_a_hurry = self._context.stopping.is_set()
        evaluation = None if in_a_hurry else await self._newest_evaluation()
        try:
            await self._torch.run(lambda: self._save(position, evaluation))
        except OSError as error:
            self.failing = True
            folder = self.store.folder
            failed("checkpoint", f"the one before is intact; free space at {folder}; tried again at the next step", error)
            return
        self.failing = False
        self.written = position.batch_number
        self._batches.saved()
        self._gauges.checkpointed(self.written)
        if in_a_hurry:
            return
        try:
            await self._batches.forget(self.store.replay_seq())
        except TransportError as error:
            self._log.warning("batch_log_not_purged", reason=str(error), consequence="retried at the next checkpoint")
        self._seconds = time.perf_counter() - started
        self._log.info("checkpoint", step=self.written, seconds=round(self._seconds, 3))

    def _save(self, position: TrainedPosition, evaluation: EvalReport | None) -> None:
        self.store.save(self._learner.state(), position, _trained_model(self._config, self._learner))
        if evaluation is not None and evaluation.n:
            trainer, tolerance = self._config.trainer, self._config.eval.every_versions // 2
            self.store.note_evaluation(
                evaluation.policy_version,
                evaluation.score,
                tolerance=max(trainer.checkpoint_every, tolerance),
                by_reward=evaluation.pass_rate is None,
            )
        self.store.prune()

    async def _newest_evaluation(self) -> EvalReport | None:
        try:
            entry = await self._context.node.kv.get(node_bucket(self._config.node.id), EVAL_KEY)
            return decode(entry.value, EvalReport) if entry is not None else None
        except (TransportError, MessageError) as error:
            self._log.warning("evaluation_unreadable", reason=str(error), consequence="the best checkpoint is unchanged")
            return None


def _trained_model(config: NodeConfig, learner: Learner) -> TrainedModel:
    lora, path = config.trainer.lora, Path(config.model.path)
    return TrainedModel(
        model_path=str(path.absolute()) if path.is_dir() else config.model.path,
        dtype=dtype_name(learner.dtype),
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        lora_target_modules=lora.target_modules,
        model_revision=config.model.revision,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
