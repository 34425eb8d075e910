"""The trainer: reads the batch log, trains one step per batch, publishes each policy, writes
checkpoints.

This file has the loop of steps; `services.trainer.step_publisher` writes everything else. A failure
outside the step (disk, policy store, server) does not change training: it is counted, logged and
retried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from services.trainer.batch_log import BatchLog
from services.trainer.checkpoint import CheckpointError, PolicyVersion
from services.trainer.figures import TrainerGauges
from services.trainer.learner import Learner, TorchThread
from services.trainer.objectives.config import configured_objective, departures
from services.trainer.objectives.token_loss import trial_problem
from services.trainer.records import (
    MetricsLog,
    StepRecord,
    StepScorer,
    batch_line,
    newest_recorded,
    scalars,
    trained_line,
)
from services.trainer.selection.left_out import remedies
from services.trainer.step_publisher import CheckpointKeeper, StepPublisher
from services.trainer.tracking.base import Feeds, open_feeds, tracking_problems
from shared.cancelling import sleep_unless_stopped, unless_stopped
from shared.config import NodeConfig, rewards_id
from shared.contracts.messages import Batch, batch_fields
from shared.contracts.status_figures import FIRST_GROUPS, StatusFigure
from shared.device_turns import TurnError, device_turns
from shared.model.weights import WeightsError
from shared.policy_store import PolicyStoreError
from shared.run_records import (
    BATCHES_FILE,
    BATCHES_MAX_BYTES,
    EVAL_FILE,
    EVAL_SETS_FILE,
    TRAINED_FILE,
    TRAINED_MAX_BYTES,
    BoundedLines,
    forget_evaluations_after,
)
from shared.runtime import FatalError, ServiceContext
from shared.transport.base import NotConnected, TransportError


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


_POLL_S = (0.005, 0.01, 0.02, 0.05)
_RETRY_S = 1.0
_MAX_READ_FAILURES = 20
_GRACE_S = 1.0
"""How long a stopping trainer tries to publish its last step. If it cannot, it does so after its
restart.
"""


class TrainerService:
    """Trains one node's policy."""

    def __init__(self, config: NodeConfig, learn: Callable[[NodeConfig], Learner] = Learner) -> None:
        try:
            problem = trial_problem(configured_objective(config))
        except (ValueError, TypeError) as error:
            problem = str(error)
        if problem:
            raise FatalError(problem)
        if problems := tracking_problems(config):
            raise FatalError("\n".join(problems))
        self._config, self._learn = config, learn

    async def run(self, context: ServiceContext) -> None:
        """Train until told to stop. After `trainer.max_steps` steps, keep answering health checks
        until then.
        """
        worker = TorchThread()
        try:
            context.status.state("loading")
            training = await _Training.start(self._config, context, worker, self._learn)
            try:
                await training.run()
            finally:
                training.close()
        finally:
            worker.shutdown()


class _Training:
    """One run of a trainer process, from the checkpoint it starts with to its end."""

    def __init__(
        self, config: NodeConfig, context: ServiceContext, worker: TorchThread, learner: Learner, gauges: TrainerGauges
    ) -> None:
        self._config, self._context, self._torch = config, context, worker
        self._learner, self._gauges = learner, gauges
        self._told_reasons: set[str] = set()
        self._scorers, self._rewards_read_at = StepScorer(config.tasks), time.time()
        context.status.scorer = rewards_id(config.tasks)
        self._log = context.log
        self._batches = BatchLog(context.node, config.node.id)
        self._checkpoints = CheckpointKeeper(config, context, learner, gauges, self._batches, worker)
        self._publisher = StepPublisher(config, context, learner, gauges, self._checkpoints, worker)
        self._device = DeviceStep(config, learner, worker, context.stopping)
        self._metrics: MetricsLog
        self._trackers: Feeds
        self._trained = BoundedLines(config.node.run_dir / TRAINED_FILE, TRAINED_MAX_BYTES)
        self._trained_batches = BoundedLines(config.node.run_dir / BATCHES_FILE, BATCHES_MAX_BYTES)

    @classmethod
    async def start(
        cls, config: NodeConfig, context: ServiceContext, worker: TorchThread, learn: Callable[[NodeConfig], Learner]
    ) -> _Training:
        """Load the model and the newest complete checkpoint, and read what is published."""
        gauges = TrainerGauges(context.registry)
        gauges.checkpoint_interval.set(config.trainer.checkpoint_every)
        try:
            learner = await worker.run(lambda: learn(config))
            training = cls(config, context, worker, learner, gauges)
        except (ValueError, PolicyStoreError) as error:
            raise FatalError(f"the trainer cannot start with this configuration: {error}") from None
        await training._resume()
        return training

    async def run(self) -> None:
        """Run step after step. When stopped, write a checkpoint of the last step and return; where
        that fails, the context says so.
        """
        self._tell_objective()
        self._context.mark_ready()
        self._context.status.state("training" if self._publisher.policy.batch_number else FIRST_GROUPS)
        while not self._context.stopping.is_set() and not self._finished():
            waited = time.perf_counter()
            found = await self._next_batch()
            if found is None:
                break
            await self._step(*found, wait_s=time.perf_counter() - waited)
        if self._finished():
            await self._save()
            await self._wait_finished()
        await self._save()
        if self._unsaved:
            self._context.unsaved = True
            saved = self._checkpoints.written
            again = f"a restart trains the steps after {saved} again" if saved else "a restart trains every step again"
            self._log.error(
                "last_policy_not_saved",
                reason=f"the checkpoint of step {self._publisher.policy.batch_number} could not be written",
                consequence=f"{again}, and an export has none of them",
                remedy=f"see write_failed above, and {self._checkpoints.store.folder}; then continue the run",
            )

    @property
    def _unsaved(self) -> bool:
        return self._publisher.policy.batch_number > self._checkpoints.written

    async def _save(self) -> None:
        if self._unsaved:
            await self._publisher.checkpoint()

    def _tell_objective(self) -> None:
        """Log what the objective's name stands for here, as a warning if it is not what its source
        publishes.
        """
        trainer, chosen = self._config.trainer, configured_objective(self._config)
        changed = departures(trainer, chosen.objective)
        say = self._log.warning if changed else self._log.info
        kind = chosen.objective.advantages
        say(
            "objective",
            name=chosen.name,
            mean_over=chosen.aggregated_by,
            advantages="its own" if callable(kind) else kind,
            divided_by=chosen.scale if chosen.objective.divides_by_deviation else "none",
            clip=[chosen.settings.clip_low, chosen.settings.clip_high] if chosen.objective.clips else None,
            changed=changed,
            differs=chosen.objective.differs,
        )

    def close(self) -> None:
        self._trackers.close()

    async def _resume(self) -> None:
        """Resume from the newest intact checkpoint. Broken ones are renamed only after an older one
        was loaded and the batch log was found to continue it: else they are all that an operator
        has to repair.
        """
        try:
            checkpoint, broken = await self._torch.run(self._checkpoints.store.newest)
            for reason in broken:
                self._gauges.fallbacks.inc()
                self._log.warning("checkpoint_broken", reason=reason, consequence="going on from the one before it")
            if checkpoint is not None:
                await self._torch.run(lambda: self._learner.restore(checkpoint.state))
                self._publisher.policy = checkpoint.position
        except (CheckpointError, WeightsError, ValueError) as error:
            raise FatalError(f"cannot resume: {error}") from None
        self._checkpoints.written = self._publisher.policy.batch_number
        try:
            self._metrics = await self._torch.run(
                lambda: MetricsLog(self._config.node.run_dir, self._publisher.policy.batch_number)
            )
        except OSError as error:
            raise FatalError(f"{self._config.node.run_dir} cannot be written ({error}): free space or set node.var_dir") from None
        if await self._until_connected(self._read_published) and await self._until_connected(self._reconcile_record) and broken:
            self._checkpoints.store.set_aside(newer_than=self._publisher.policy.batch_number)
        self._trackers = open_feeds(self._config, self._publisher.policy.batch_number, self._log)
        self._context.status.set(StatusFigure.STEP, self._publisher.policy.batch_number)
        self._context.status.set(StatusFigure.MAX_STEPS, self._config.trainer.max_steps or None)
        self._log.info(
            "training", step=self._publisher.policy.batch_number, resumed=checkpoint is not None, model=self._config.model.path
        )

    async def _reconcile_record(self) -> None:
        """Warn if the record goes on after the checkpoint, as after a kill. Where the batch log
        does not, as after a restore, other batches come, and the evaluations of later policies no
        longer count.
        """
        position, folder = self._publisher.policy, self._config.node.run_dir
        resumed = position.batch_number
        with self._context.writes.trying("metrics", f"see to {folder}; then start the trainer again"):
            recorded, time_s = await asyncio.to_thread(newest_recorded, folder)
            if recorded <= resumed:
                return
            logged = await self._batches.made_before(position, time_s)
            same = min(recorded, logged)
            repeated = f"steps {resumed + 1} to {same} are trained again, with the same batches" if same > resumed else ""
            gone = f"steps after {same} get other batches, and evaluations of the policies that were there do not count"
            self._log.warning(
                "steps_trained_again",
                reason=f"the record goes to step {recorded}, the newest checkpoint is of step {resumed}, "
                f"and the batch log had batches to {logged} then",
                consequence="; ".join(filter(None, (repeated, gone if recorded > logged else ""))),
                same_until=same,
            )
            for file in (folder / EVAL_FILE, folder / EVAL_SETS_FILE):
                if recorded > logged and file.is_file():
                    await asyncio.to_thread(forget_evaluations_after, file, logged, time.time())

    async def _read_published(self) -> None:
        await self._batches.check(self._publisher.policy, self._checkpoints.store)
        await self._publisher.begin()

    async def _until_connected(self, action: Callable[[], Any]) -> bool:
        """Retry until the server answers. False if stopped before."""
        while not self._context.stopping.is_set():
            try:
                await action()
                return True
            except NotConnected as error:
                self._log.warning("node_plane_away", reason=str(error), consequence=f"trying again in {_RETRY_S} s")
                await sleep_unless_stopped(self._context.stopping, _RETRY_S)
        return False

    def _finished(self) -> bool:
        limit = self._config.trainer.max_steps
        return bool(limit) and self._publisher.policy.batch_number >= limit

    async def _next_batch(self) -> tuple[Batch, int] | None:
        """Wait for the next batch, with its place in the log, and meanwhile retry what could not be
        written. None when stopped.
        """
        polls = failures = 0
        next_retry = 0.0
        while not self._context.stopping.is_set():
            try:
                found = await unless_stopped(self._context.stopping, self._batches.after(self._publisher.policy))
                failures = 0
            except TransportError as error:
                failures += not isinstance(error, NotConnected)
                if failures > _MAX_READ_FAILURES:
                    raise FatalError(f"batch {self._publisher.policy.batch_number + 1} cannot be read: {error}") from None
                self._log.warning("batch_unreadable", reason=str(error), consequence=f"trying again in {_RETRY_S} s")
                await sleep_unless_stopped(self._context.stopping, _RETRY_S)
                continue
            if found is not None:
                return found
            if time.monotonic() >= next_retry:
                next_retry = time.monotonic() + _RETRY_S
                await unless_stopped(self._context.stopping, self._publisher.run(log_exhausted=True))
            await sleep_unless_stopped(self._context.stopping, _POLL_S[min(polls // 20, len(_POLL_S) - 1)])
            polls += 1
        return None

    async def _step(self, batch: Batch, stream_seq: int, *, wait_s: float) -> None:
        """Train on the batch, whose number is that of the policy it makes. The position advances
        before anything is written: the step has been taken, and what cannot be written is retried
        later.
        """
        self._context.status.state("training")
        trained = await self._device.train(batch)
        if trained is None:
            return
        record, turn_s = trained
        position = PolicyVersion(batch_number=batch.number, stream_seq=stream_seq, consumed_local=batch.state.consumed_local)
        self._publisher.policy = position
        self._publisher.findings.note(batch.number, record.absurd_of, record.foreign_answers_of)
        started = time.perf_counter()
        await unless_stopped(self._context.stopping, self._publisher.run(log_exhausted=False), grace_s=_GRACE_S)
        phases = replace(
            record.phase_seconds,
            wait=wait_s + turn_s,
            publish=time.perf_counter() - started,
            checkpoint=self._checkpoints.step_seconds(),
        )
        self._tell_other_rewards(batch)
        scorer = self._scorers.of([item.scored for item in batch.items])
        self._write(replace(record, phase_seconds=phases, scorer=scorer), batch, position)
        if self._checkpoints.due(position.batch_number):
            await self._publisher.checkpoint()
        await self._until_saved()

    async def _until_saved(self) -> None:
        if not self._checkpoints.holds_up:
            return
        self._context.status.state("waiting for a checkpoint")
        self._log.error(
            "training_waits",
            reason="no checkpoint can be written, and the batch log would drop batches that no checkpoint contains",
            remedy=f"free space at {self._checkpoints.store.folder}; training then continues automatically",
        )
        while self._checkpoints.holds_up and not self._context.stopping.is_set():
            await sleep_unless_stopped(self._context.stopping, _RETRY_S)
            if self._checkpoints.is_to_be_tried_again:
                await self._publisher.checkpoint()
        self._context.status.state("training")

    def _write(self, record: StepRecord, batch: Batch, position: PolicyVersion) -> None:
        """The step has been taken, so what cannot be written here is reported and stops nothing."""
        writes = self._context.writes
        with writes.trying("metrics", "free space under node.var_dir; the lines are kept and written later"):
            self._metrics.append(record)
        remedy = "free space under node.var_dir; training goes on, and what these steps trained on is not on record"
        with writes.trying("trained", remedy):
            how: dict[str, Any] = {"updated": record.updated, "updates": record.updates}
            self._trained.append(trained_line(record.step, record.time, **how, groups=self._learner.trained))
            self._trained_batches.append(batch_line(batch))
        self._trackers.offer(scalars(record), record.step)
        self._gauges.observe(record, self._context)
        self._tell_left_out(record)
        self._log.info(
            "step",
            **batch_fields(batch),
            step=record.step,
            stream_seq=position.stream_seq,
            loss=None if record.loss is None else round(record.loss, 6),
            reward_local=record.reward_local,
            reward_external=record.reward_external,
            updated=record.updated,
            seconds=round(record.phase_seconds.total, 3),
        )

    def _tell_other_rewards(self, batch: Batch) -> None:
        """Batches that were in the log when a reward was changed are trained on: the same log gives
        the same weights. Groups that another reward has scored since this process read its own
        are of a verifier that has read another file.
        """
        others = [item.scored for item in batch.items if item.scored.scorer not in (None, *self._scorers.own)]
        former = sum(scored.scored_at < self._rewards_read_at for scored in others)
        if former and not self._context.status.get(StatusFigure.FORMER_REWARDS):
            self._log.warning(
                "former_rewards",
                batch=batch.number,
                groups=former,
                reason="these groups were scored before a reward's file, a verifier, its package or pass_at was changed",
                consequence="they are trained on with their former rewards, as are others in the batch log",
            )
        self._context.status.set(StatusFigure.FORMER_REWARDS, former or None)
        if len(others) > former and "other_rewards" not in self._told_reasons:
            self._told_reasons.add("other_rewards")
            self._log.warning(
                "other_rewards",
                batch=batch.number,
                groups=len(others) - former,
                reason="the node's verifier and trainer were started with different rewards: a reward's file, a verifier, its "
                "package or pass_at was changed between",
                consequence="the groups are trained on with the verifier's rewards; held-out answers may be scored by the other",
                remedy="restart the node's processes that were started before the change; `swarm status` names them",
            )

    def _tell_left_out(self, record: StepRecord) -> None:
        """Log each reason for which a step leaves groups out, once."""
        new = {reason: count for reason, count in record.skipped.items() if count and reason not in self._told_reasons}
        self._told_reasons |= new.keys()
        if new:
            say = self._log.info if new.keys() == {"absurd"} else self._log.warning
            say("groups_skipped", step=record.step, reasons=new, remedy=remedies(new))

    async def _wait_finished(self) -> None:
        """All steps are taken: report it, write what is pending, and wait to be stopped."""
        self._context.status.state("finished")
        self._context.status.set(StatusFigure.FINISHED, 1)
        self._gauges.finished.set(1)
        self._log.info("finished", steps=self._publisher.policy.batch_number)
        while not self._context.stopping.is_set():
            await unless_stopped(self._context.stopping, self._publisher.run_when_finished())
            await sleep_unless_stopped(self._context.stopping, _RETRY_S)
