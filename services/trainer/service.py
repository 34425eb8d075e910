"""The trainer: reads the batch log, trains a step per batch, publishes each policy, writes checkpoints.

Torch works in one thread of its own, so that health, status and NATS go on during a step. Nothing that fails outside the step
(disk, policy store, server) changes what is trained: it is counted, said, and tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from services.trainer.durable.batch_log import BatchLog
from services.trainer.durable.checkpoint import CheckpointError, CheckpointStore, TrainedModel
from services.trainer.durable.delta_report import DeltaReport
from services.trainer.durable.export import CHECKPOINTS
from services.trainer.durable.publish import Publisher, publication
from services.trainer.figures import TrainerGauges
from services.trainer.findings import Findings
from services.trainer.learner import Learner
from services.trainer.records import MetricsLog, StepRecord
from services.trainer.state import TrainedPosition
from shared.config import NodeConfig
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, TrainerPosition
from shared.contracts.messages import Batch
from shared.contracts.rollout_id import batch_fields
from shared.contracts.subjects import EVAL_KEY, TRAINER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.device_turns import TurnError, device_turns
from shared.model.weights import WeightsError, write_tensors
from shared.policy_store import PolicyStoreError, open_policy_store
from shared.runtime import FatalError, ServiceContext, sleep_unless_stopped
from shared.transport.base import NotConnected, TransportError

T = TypeVar("T")
_POLL_S = (0.005, 0.01, 0.02, 0.05)
_RETRY_S = 1.0
_MAX_READ_FAILURES = 20
_GRACE_S = 1.0
"""How long a stopping trainer tries to tell others of its last step; what they miss they learn when it is back."""


class TrainerService:
    """Trains one node's policy."""

    def __init__(self, config: NodeConfig, learn: Callable[[NodeConfig], Learner] = Learner) -> None:
        self._config, self._learn = config, learn

    async def run(self, context: ServiceContext) -> None:
        """Train until told to stop; after `trainer.max_steps` steps keep answering health checks until then."""
        worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        try:
            context.status.state("loading")
            training = await _Training.start(self._config, context, worker, self._learn)
            try:
                await training.run()
            finally:
                training.close()
        finally:
            worker.shutdown(wait=False, cancel_futures=True)


class _Training:
    """One life of a trainer, from the checkpoint it starts with to its end."""

    def __init__(
        self, config: NodeConfig, context: ServiceContext, worker: ThreadPoolExecutor, learner: Learner, gauges: TrainerGauges
    ) -> None:
        node = config.node.id
        self._config, self._context, self._worker = config, context, worker
        self._learner, self._gauges = learner, gauges
        self._log = context.log
        self._bucket = node_bucket(node)
        self._batches = BatchLog(context.node, node)
        self._checkpoints = _checkpoint_store(config)
        self._publisher = Publisher(
            open_policy_store(
                config.policy_store_uri,
                context.node,
                node,
                replicas=config.nats.replicas,
                create=config.nats.create_streams,
                scratch=config.node.run_dir / "published",
                anchor_every=config.policy_store.anchor_every,
            ),
            context.node,
            node=node,
            staging=config.node.run_dir / "publishing",
            keep=config.policy_store.keep,
        )
        self._position = TrainedPosition()
        self._checkpointed = 0
        self._checkpoint_failed = False
        self._checkpoint_s = 0.0
        self._confirmed: int | None = None
        self._announced: TrainerPosition | None = None
        self._findings = Findings(node)
        self._turns = device_turns(config, "trainer")
        self._delta_report = DeltaReport(gauges.delta_lost, context.log)
        self._metrics: MetricsLog

    @classmethod
    async def start(
        cls, config: NodeConfig, context: ServiceContext, worker: ThreadPoolExecutor, learn: Callable[[NodeConfig], Learner]
    ) -> _Training:
        """Load the model, the newest whole checkpoint, and learn what is published."""
        gauges = TrainerGauges(context.registry)
        gauges.checkpoint_interval.set(config.trainer.checkpoint_every)
        loop = asyncio.get_running_loop()
        try:
            learner = await loop.run_in_executor(worker, learn, config)
            training = cls(config, context, worker, learner, gauges)
        except (ValueError, PolicyStoreError) as error:
            raise FatalError(f"the trainer cannot start with this configuration: {error}") from None
        await training._resume()
        return training

    async def run(self) -> None:
        """Step after step; returns when stopped, with a checkpoint of the last step."""
        self._context.mark_ready()
        self._context.status.state("training")
        while not self._context.stopping.is_set() and not self._finished():
            waited = time.perf_counter()
            found = await self._next_batch()
            if found is None:
                break
            await self._step(*found, wait_s=time.perf_counter() - waited)
        if self._position.batch_number > self._checkpointed:
            await self._checkpoint()
        if self._finished():
            await self._rest()

    def close(self) -> None:
        """Close files."""
        self._metrics.close()

    async def _resume(self) -> None:
        try:
            checkpoint, broken = await self._in_torch(self._checkpoints.newest)
            for reason in broken:
                self._gauges.fallbacks.inc()
                self._log.warning("checkpoint_broken", reason=reason, consequence="going on from the one before it")
            if checkpoint is not None:
                await self._in_torch(lambda: self._learner.restore(checkpoint.state))
                self._position = checkpoint.position
                if broken:
                    self._checkpoints.set_aside(newer_than=checkpoint.position.batch_number)
        except (CheckpointError, WeightsError, ValueError) as error:
            raise FatalError(f"cannot resume: {error}") from None
        self._checkpointed = self._position.batch_number
        try:
            self._metrics = await self._in_torch(lambda: MetricsLog(self._config.node.run_dir, self._position.batch_number))
        except OSError as error:
            raise FatalError(f"{self._config.node.run_dir} cannot be written ({error}): free space or set node.var_dir") from None
        await self._until_connected(self._look_around)
        self._context.status.set("step", self._position.batch_number)
        self._log.info("training", step=self._position.batch_number, resumed=checkpoint is not None, model=self._config.model.path)

    async def _look_around(self) -> None:
        await self._batches.check(self._position)
        try:
            await self._publisher.read_pointer()
        except MessageError as error:
            raise FatalError(f"the policy pointer cannot be read ({error}): run all services in the same version") from None
        await self._announce()

    async def _until_connected(self, action: Callable[[], Any]) -> None:
        while not self._context.stopping.is_set():
            try:
                await action()
                return
            except NotConnected as error:
                self._log.warning("node_plane_away", reason=str(error), consequence=f"trying again in {_RETRY_S} s")
                await sleep_unless_stopped(self._context.stopping, _RETRY_S)

    def _finished(self) -> bool:
        limit = self._config.trainer.max_steps
        return bool(limit) and self._position.batch_number >= limit

    async def _next_batch(self) -> tuple[Batch, TrainedPosition] | None:
        """Wait for the next batch, catching up meanwhile on what could not be written. None when stopped."""
        polls = failures = 0
        next_upkeep = 0.0
        while not self._context.stopping.is_set():
            try:
                found = await self._unless_stopped(self._batches.after(self._position))
                failures = 0
            except TransportError as error:
                failures += not isinstance(error, NotConnected)
                if failures > _MAX_READ_FAILURES:
                    raise FatalError(f"batch {self._position.batch_number + 1} cannot be read: {error}") from None
                self._log.warning("batch_unreadable", reason=str(error), consequence=f"trying again in {_RETRY_S} s")
                await sleep_unless_stopped(self._context.stopping, _RETRY_S)
                continue
            if found is not None:
                return found
            if time.monotonic() >= next_upkeep:
                next_upkeep = time.monotonic() + _RETRY_S
                await self._unless_stopped(self._upkeep(log_exhausted=True))
            await sleep_unless_stopped(self._context.stopping, _POLL_S[min(polls // 20, len(_POLL_S) - 1)])
            polls += 1
        return None

    async def _step(self, batch: Batch, position: TrainedPosition, *, wait_s: float) -> None:
        try:
            trained = await self._step_in_turn(batch)
        except torch.OutOfMemoryError as error:
            problem = f"step {batch.number} does not fit into the device's memory ({str(error).splitlines()[0]})"
            remedy = "lower trainer.token_budget, or set trainer.gradient_checkpointing or trainer.lora.rank"
            if self._turns is not None:
                # One that was killed in its turn may not have given its memory back yet.
                raise RuntimeError(f"{problem}: trying again from the last checkpoint; should it stay so, {remedy}") from error
            raise FatalError(f"{problem}: {remedy}") from None
        if trained is None:
            return
        record, turn_s = trained
        self._position = position
        self._findings.note(batch.number, record.absurd_of, record.foreign_answers_of)
        started = time.perf_counter()
        await self._unless_stopped(self._upkeep(log_exhausted=False), grace_s=_GRACE_S)
        phases = replace(
            record.phase_seconds, wait=wait_s + turn_s, publish=time.perf_counter() - started, checkpoint=self._checkpoint_s
        )
        self._write(replace(record, phase_seconds=phases), batch, position)
        self._checkpoint_s = 0.0
        if self._checkpoint_failed or position.batch_number % self._config.trainer.checkpoint_every == 0:
            await self._checkpoint()

    async def _step_in_turn(self, batch: Batch) -> tuple[StepRecord, float] | None:
        """Train on `batch`, alone on the device where it is shared in turns; with the seconds waited for that. None where the
        service is stopped first.
        """
        if self._turns is None:
            return await self._in_torch(lambda: self._learner.step(batch)), 0.0
        try:
            waited = await self._unless_stopped(self._turns.take())
        except TurnError as error:
            raise FatalError(str(error)) from None
        if waited is None:
            return None
        try:
            return await self._in_torch(lambda: self._learner.step(batch)), waited
        finally:
            if torch.cuda.is_available():
                await self._in_torch(torch.cuda.empty_cache)
            self._turns.give_up()

    def _write(self, record: StepRecord, batch: Batch, position: TrainedPosition) -> None:
        try:
            self._metrics.append(record)
        except OSError as error:
            self._failed("metrics", "free space under node.var_dir; the line is kept and written later", error)
        self._gauges.observe(record, self._context)
        if record.skipped:
            self._log.warning("groups_skipped", step=record.step, reasons=record.skipped)
        self._log.info(
            "step",
            **batch_fields(batch),
            step=record.step,
            policy_version=record.policy_version,
            stream_seq=position.stream_seq,
            loss=round(record.loss, 6),
            reward_local=record.reward_local,
            reward_external=record.reward_external,
            updated=record.updated,
            seconds=round(record.phase_seconds.total, 3),
        )

    async def _upkeep(self, *, log_exhausted: bool) -> None:
        """Publish the policy if it is due and tell the others how far training is; failures are left for the next time."""
        try:
            await self._publish(log_exhausted)
        except (OSError, PolicyStoreError, TransportError) as error:
            remedy = "generators keep the old policy; free space at policy_store.uri or see to the server; tried again"
            self._failed("policy", remedy, error)
        try:
            await self._answer_refusal()
        except (OSError, PolicyStoreError, TransportError, MessageError) as error:
            self._log.warning("refused_policy_not_answered", reason=str(error), consequence="generators keep the old policy")
        try:
            await self._announce()
        except TransportError as error:
            self._failed("position", "the sampler waits; see to the NATS server; tried again", error)
        try:
            await self._findings.tell(self._context.node, time.time())
        except TransportError as error:
            self._log.warning("findings_not_written", reason=str(error), consequence="tried again after the next step")
        try:
            await self._publisher.prune()
        except (PolicyStoreError, TransportError) as error:
            self._log.warning("policies_not_pruned", reason=str(error), consequence="tried again after the next policy")
        if log_exhausted and self._checkpoint_failed:
            await self._checkpoint()

    async def _publish(self, log_exhausted: bool) -> None:
        version = self._position.batch_number
        old = self._publisher.pointer
        decision = publication(version, old.version if old else None, log_exhausted=log_exhausted)
        if decision == "hold" or (decision == "confirm" and self._confirmed == version):
            return
        if decision == "step_back":
            assert old is not None
            self._log.warning(
                "policy_steps_back",
                reason=f"the batch log ends at {version}, but policy {old.version} was published: batches between them are lost",
                consequence=f"generators go back to policy {version}",
            )
        await self._publisher.publish(self._write_policy, self._position)
        self._confirmed = version
        self._note_published(version)
        published = self._publisher.pointer
        assert published is not None
        if decision == "confirm" and old is not None and old.sha256 != published.sha256:
            self._log.warning("policy_published_again", version=version, reason="the replay did not give the same bytes")

    async def _answer_refusal(self) -> None:
        """Publish the newest policy as a full copy where a generator says that it cannot be fetched."""
        refusal = await self._publisher.refused(self._position)
        if refusal is None:
            return
        version = self._position.batch_number
        self._log.warning(
            "policy_published_whole",
            version=version,
            reason=f"a generator could not fetch policy {refusal.version}: {refusal.reason}",
        )
        self._publisher.begin_again()
        await self._publisher.publish(self._write_policy, self._position)
        self._note_published(version)

    def _note_published(self, version: int) -> None:
        published = self._publisher.pointer
        assert published is not None
        self._gauges.published(published)
        sent_kind, sent_bytes = self._publisher.sent_kind, self._publisher.sent_bytes
        self._gauges.published_bytes.labels(sent_kind).inc(sent_bytes)
        self._log.info("policy_published", version=version, sent=sent_kind, sent_bytes=sent_bytes)
        self._delta_report.published(
            self._learner.delta_rounding, version=version, dtype=_dtype_name(self._learner.published_dtype)
        )
        self._context.status.set("policy_version", version)

    async def _write_policy(self, file: Path) -> None:
        await self._in_torch(lambda: write_tensors(self._learner.policy(), file, self._learner.policy_metadata))

    async def _announce(self, finished: bool = False) -> None:
        position = TrainerPosition(
            batch_number=self._position.batch_number,
            step=self._position.batch_number,
            policy_version=self._position.batch_number,
            consumed_local=self._position.consumed_local,
            finished=finished,
        )
        if position != self._announced:
            await self._context.node.kv_put(self._bucket, TRAINER_KEY, encode(position))
            self._announced = position

    async def _checkpoint(self) -> None:
        started = time.perf_counter()
        in_a_hurry = self._context.stopping.is_set()
        evaluation = None if in_a_hurry else await self._newest_evaluation()
        try:
            await self._in_torch(lambda: self._save(evaluation))
        except OSError as error:
            self._checkpoint_failed = True
            folder = self._checkpoints.folder
            self._failed("checkpoint", f"the one before is intact; free space at {folder}; tried again at the next step", error)
            return
        self._checkpoint_failed = False
        self._checkpointed = self._position.batch_number
        self._gauges.checkpointed(self._checkpointed)
        if in_a_hurry:
            return
        try:
            await self._batches.forget(self._checkpoints.replay_seq())
        except TransportError as error:
            self._log.warning("batch_log_not_purged", reason=str(error), consequence="tried again at the next checkpoint")
        self._checkpoint_s = time.perf_counter() - started
        self._log.info("checkpoint", step=self._checkpointed, seconds=round(self._checkpoint_s, 3))

    def _save(self, evaluation: EvalReport | None) -> None:
        self._checkpoints.save(self._learner.state(), self._position, _trained_model(self._config, self._learner))
        if evaluation is not None and evaluation.n:
            trainer, tolerance = self._config.trainer, self._config.eval.every_versions // 2
            self._checkpoints.note_evaluation(
                evaluation.policy_version, evaluation.pass_rate, tolerance=max(trainer.checkpoint_every, tolerance)
            )
        self._checkpoints.prune()

    async def _newest_evaluation(self) -> EvalReport | None:
        try:
            entry = await self._context.node.kv_get(self._bucket, EVAL_KEY)
            return decode(entry.value, EvalReport) if entry is not None else None
        except (TransportError, MessageError) as error:
            self._log.warning("evaluation_unreadable", reason=str(error), consequence="the best checkpoint stays as it is")
            return None

    async def _rest(self) -> None:
        """All steps are taken: say so, see that everything is written, and wait for the end."""
        self._context.status.state("finished")
        self._context.status.set("finished", 1)
        self._gauges.finished.set(1)
        self._log.info("finished", steps=self._position.batch_number)
        while not self._context.stopping.is_set():
            await self._unless_stopped(self._upkeep_when_finished())
            await sleep_unless_stopped(self._context.stopping, _RETRY_S)

    async def _upkeep_when_finished(self) -> None:
        if self._checkpoint_failed:
            await self._checkpoint()
        try:
            await self._publish(log_exhausted=True)
            await self._announce(finished=True)
        except (OSError, PolicyStoreError, TransportError) as error:
            self._failed("policy", "free space at policy_store.uri or see to the server; tried again", error)

    def _failed(self, kind: str, remedy: str, error: Exception) -> None:
        self._gauges.write_failures.labels(kind).inc()
        self._context.status.add(f"{kind}_write_failures")
        self._log.error("write_failed", kind=kind, reason=str(error), remedy=remedy)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T | None:
        """The outcome of `work`, or None when the service is stopped and `grace_s` more did not suffice: a server that is away
        must not keep the last checkpoint from being written in time."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._context.stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=grace_s)
            return task.result() if task.done() else None
        finally:
            stop.cancel()
            task.cancel()

    async def _in_torch(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def _checkpoint_store(config: NodeConfig) -> CheckpointStore:
    trainer = config.trainer
    return CheckpointStore(config.node.run_dir / CHECKPOINTS, keep=trainer.keep_checkpoints, keep_best=trainer.keep_best)


def _trained_model(config: NodeConfig, learner: Learner) -> TrainedModel:
    lora, path = config.trainer.lora, Path(config.model.path)
    return TrainedModel(
        model_path=str(path.absolute()) if path.is_dir() else config.model.path,
        dtype=_dtype_name(learner.dtype),
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        lora_target_modules=lora.target_modules,
        model_revision=config.model.revision,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
