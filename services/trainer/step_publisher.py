"""Everything that is written after a step: the new policy for the generators (a file, an entry in
the policy store, then the pointer to it), checkpoints, the trainer's position, and its findings. A
failure is retried the next time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import torch
from msgspec import structs

from services.trainer.batch_log import BatchLog
from services.trainer.checkpoint import CheckpointStore, PolicyVersion, TrainedModel, evaluation_measure
from services.trainer.figures import TrainerGauges
from services.trainer.gradient.importance import uses_foreign_logprobs
from services.trainer.learner import Learner, TorchThread
from services.trainer.objectives.config import configured_objective
from services.trainer.selection.left_out import Findings
from shared.config import NodeConfig
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, PolicyPointer, PolicyRefusal, TrainerPosition
from shared.contracts.status_figures import StatusFigure
from shared.contracts.subjects import EVAL_KEY, POLICY_KEY, POLICY_REFUSED_KEY, TRAINER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.model.weights import DeltaRounding, write_tensors
from shared.policy_store import PolicyStore, PolicyStoreError, StoredPolicy, open_policy_store
from shared.run_records import CHECKPOINTS
from shared.runtime import FatalError, ServiceContext
from shared.runtime.writes import LONGEST_WAIT_S
from shared.transport.base import Transport, TransportError

ANSWERS = 3
"""How often one version is published again. Without this limit a generator that cannot see the
store at all would cause it to be sent for ever.
"""

Decision = Literal["publish", "confirm", "hold", "step_back"]


def publication(version: int, pointer_version: int | None, *, log_exhausted: bool) -> Decision:
    """Decide what to do with the policy of `version` if the pointer names `pointer_version` (None:
    the base policy).

    While a resumed trainer replays its log, older policies stay unpublished (`hold`); when it
    reaches the published version, it confirms that its bytes are the same (`confirm`). If the log
    ends before that version, batches were lost, and the generators must return to the policy that
    is trained (`step_back`).
    """
    if pointer_version is None:
        return "publish" if version > 0 else "hold"
    if version > pointer_version:
        return "publish"
    if version == pointer_version:
        return "confirm"
    return "step_back" if log_exhausted else "hold"


class Publisher:
    """Publishes policies of one node and remembers which one is published."""

    def __init__(self, store: PolicyStore, transport: Transport, *, node: str, staging: Path, keep: int) -> None:
        self._store = store
        self._transport = transport
        self._bucket = node_bucket(node)
        self._staging = staging
        self._keep = keep
        self._pruned_at: int | None = None
        self._unannounced: tuple[int, StoredPolicy] | None = None
        """A version that is stored but whose pointer could not be written; the next attempt does
        not store it again.
        """
        self._answered: bytes | None = None
        """The refusal handled last."""
        self._begun: list[int] = []
        """The published version, once for each time that it was published again."""
        self.pointer: PolicyPointer | None = None
        self.sent_bytes = 0
        self.sent_kind: Literal["full", "delta"] = "full"
        """Kind and size in bytes of the newest publication."""

    async def read_pointer(self) -> None:
        """Read which policy is published. None if the pointer is damaged or in an earlier format;
        the trainer then publishes its own again.

        Raises:
            MessageError: the pointer is of a later schema version.
        """
        entry = await self._transport.kv.get(self._bucket, POLICY_KEY)
        try:
            self.pointer = decode(entry.value, PolicyPointer) if entry is not None else None
        except MessageError as error:
            if error.reason == "schema_version":
                raise
            self.pointer = None

    async def publish(self, write: Callable[[Path], Awaitable[None]], policy: PolicyVersion) -> bool:
        """Publish the policy that `write` writes into a file. Returns whether the pointer changed.

        Raises:
            OSError: disk full.
            TransportError: server unreachable.
            PolicyStoreError: the store refuses.

        On any error the old policy stays published.
        """
        version = policy.batch_number
        if self._unannounced is not None and self._unannounced[0] == version:
            stored = self._unannounced[1]
        else:
            stored = await self._put(write, version)
            self._unannounced = version, stored
        pointer = PolicyPointer(
            version=version,
            sha256=stored.sha256,
            size_bytes=stored.size_bytes,
            uri=stored.uri,
            consumed_local=policy.consumed_local,
            created_at=time.time(),
            anchor=stored.anchor,
            deltas=list(stored.deltas),
        )
        self.sent_bytes, self.sent_kind = stored.sent_bytes, "delta" if stored.deltas else "full"
        old = self.pointer
        if old is None or structs.replace(old, created_at=0.0) != structs.replace(pointer, created_at=0.0):
            await self._transport.kv.put(self._bucket, POLICY_KEY, encode(pointer))
            self.pointer = pointer
        self._unannounced = None
        return self.pointer is pointer

    async def refused(self, policy: PolicyVersion) -> PolicyRefusal | None:
        """A generator's refusal of the published policy or of one that it is built from; None: no
        new refusal.

        Raises:
            TransportError: the server is unreachable.
            MessageError: the key's value is not a refusal.
        """
        if self.pointer is None or self.pointer.version != policy.batch_number:
            return None
        entry = await self._transport.kv.get(self._bucket, POLICY_REFUSED_KEY)
        if entry is None or entry.value == self._answered:
            return None
        refusal = decode(entry.value, PolicyRefusal)
        self._answered = entry.value
        if (refusal.version, refusal.sha256) not in _parts_of(self.pointer) or self._begun.count(self.pointer.version) >= ANSWERS:
            return None
        return refusal

    def begin_again(self) -> None:
        """Make the next publication a full copy, even if this version is already published."""
        assert self.pointer is not None
        self._begun = [version for version in self._begun if version == self.pointer.version] + [self.pointer.version]
        self._unannounced = None
        self._store.begin_again()

    async def _put(self, write: Callable[[Path], Awaitable[None]], version: int) -> StoredPolicy:
        self._staging.mkdir(parents=True, exist_ok=True)
        file = self._staging / f"{version}.safetensors"
        try:
            await write(file)
            return await self._store.publish(file, version)
        finally:
            file.unlink(missing_ok=True)

    async def prune(self) -> None:
        """Delete all policies from the store except the newest `keep` and those that the pointer
        needs. Does nothing if the pointer belongs to another process: a store on a volume knows
        no lease, and what that process has published since would be deleted as unknown to this one.
        """
        if self.pointer is None or self.pointer.version == self._pruned_at:
            return
        entry = await self._transport.kv.get(self._bucket, POLICY_KEY)
        if entry is None or entry.value != encode(self.pointer):
            return
        newest = self.pointer.version
        needed = {delta.file.version for delta in self.pointer.deltas}
        if self.pointer.anchor is not None:
            needed.add(self.pointer.anchor.version)
        if self._unannounced is not None:
            needed.add(self._unannounced[0])
        await self._store.prune(needed | set(range(max(0, newest - self._keep + 1), newest + 1)))
        self._pruned_at = newest


def _parts_of(pointer: PolicyPointer) -> set[tuple[int, str]]:
    """Version and sha256 of the policy and of every earlier one that its deltas pass through."""
    steps = {(delta.file.version, delta.makes) for delta in pointer.deltas}
    first = {(pointer.anchor.version, pointer.anchor.sha256)} if pointer.anchor is not None else set()
    return {(pointer.version, pointer.sha256)} | steps | first


MUCH = 0.1
"""A `lost_ratio` above this is worth a warning."""

_REMEDY = (
    'set trainer.lora.publish to "adapters", which adds nothing to rounded weights; or where generators cannot load adapters, '
    'set trainer.publish_dtype to "float32", or to "float16" (as small as bfloat16, and eight times as fine), and model.dtype of '
    "the generators to the same: one that computes in bfloat16 rounds again; or wait: a delta that grows comes through, sooner "
    "with a larger trainer.learning_rate or trainer.lora.alpha"
)


class CheckpointKeeper:
    """Writes a trainer's checkpoints. If one cannot be written, it is tried again, ever more rarely
    (`shared.runtime.writes`); the previous one stays intact.

    written: the batch of the newest one on disk.
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
        owner = f"{config.node.run}/{config.node.id}"
        self.store = CheckpointStore(folder, keep=trainer.keep_checkpoints, keep_best=trainer.keep_best, owner=owner)
        self.written = 0
        self._seconds = 0.0

    def step_seconds(self) -> float:
        """Seconds spent on checkpoints since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def due(self, step: int) -> bool:
        """Say whether to write a checkpoint after `step`: it is due, the last one could not be
        written and should be tried again, or the log could discard batches that no checkpoint
        contains.
        """
        if self._context.writes.failing("checkpoint"):
            return self.is_to_be_tried_again
        return self._batches.wants_checkpoint or step % self._config.trainer.checkpoint_every == 0

    @property
    def holds_up(self) -> bool:
        """Say whether training must wait until a checkpoint can be written, because a trainer that
        continued could not be restarted.
        """
        return self._context.writes.failing("checkpoint") and self._batches.wants_checkpoint

    @property
    def is_to_be_tried_again(self) -> bool:
        """Say whether the last one could not be written, and the wait since then is over."""
        return self._context.writes.failing("checkpoint") and self._context.writes.due("checkpoint")

    async def write(self, position: PolicyVersion) -> None:
        """Write a checkpoint of the state after `position`; a failure is told."""
        started = time.perf_counter()
        in_a_hurry = self._context.stopping.is_set()
        evaluation = None if in_a_hurry else await self._newest_evaluation()
        saved = f"the one of step {self.written} is intact" if self.written else "there is none yet"
        remedy = f"{saved}; free space at {self.store.folder}; tried again, at most every {LONGEST_WAIT_S:.0f} s"
        with self._context.writes.trying("checkpoint", remedy):
            await self._torch.run(lambda: self._save(position, evaluation))
            self.written = position.batch_number
        if self._context.writes.failing("checkpoint"):
            return
        self._batches.saved()
        self._gauges.checkpointed(self.written)
        if in_a_hurry:
            return
        with self._context.writes.trying("batch_log", "the batch log keeps old batches; tried again later", TransportError):
            await self._batches.forget(self.store.replay_seq())
        self._seconds = time.perf_counter() - started
        self._log.info("checkpoint", step=self.written, seconds=round(self._seconds, 3))

    def _save(self, position: PolicyVersion, evaluation: EvalReport | None) -> None:
        self.store.save(self._learner.state(), position, _trained_model(self._config, self._learner))
        if evaluation is not None and evaluation.n:
            trainer, tolerance = self._config.trainer, self._config.eval.every_versions // 2
            self.store.note_evaluation(
                evaluation.policy_version,
                evaluation.score,
                tolerance=max(trainer.checkpoint_every, tolerance),
                measure=evaluation_measure(evaluation),
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
        lora_target_modules=lora.target_modules,
        model_revision=config.model.revision,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


_POLICY_REMEDY = "generators keep the old policy; free space at policy_store.uri or see to the NATS server; tried again"


class StepPublisher:
    """Everything that is written after a step, and retried while waiting for the next batch.

    policy: the newest version, after the last batch trained on. findings: what the steps found out
    about senders.
    """

    def __init__(
        self,
        config: NodeConfig,
        context: ServiceContext,
        learner: Learner,
        gauges: TrainerGauges,
        checkpoints: CheckpointKeeper,
        worker: TorchThread,
    ) -> None:
        node = config.node.id
        self._context, self._log, self._bucket = context, context.log, node_bucket(node)
        self._learner, self._gauges, self._torch = learner, gauges, worker
        self._checkpoints = checkpoints
        self._publisher = Publisher(
            open_policy_store(
                config.policy_store_uri,
                context.node,
                node,
                replicas=config.nats.replicas,
                create=config.nats.create_streams,
                scratch=config.node.run_dir / "published",
            ),
            context.node,
            node=node,
            staging=config.node.run_dir / "publishing",
            keep=config.policy_store.keep,
        )
        self.policy = PolicyVersion()
        self.findings = Findings(node)
        self._confirmed: int | None = None
        self._announced: TrainerPosition | None = None
        self._foreign_logprobs = uses_foreign_logprobs(config.trainer, configured_objective(config).objective)
        self._warned_of_rounding = False

    async def begin(self) -> None:
        """Read what is published, and log where training resumes."""
        try:
            await self._publisher.read_pointer()
        except MessageError as error:
            raise FatalError(f"the policy pointer cannot be read ({error}): run the same version of all services") from None
        await self._announce()

    async def checkpoint(self) -> None:
        await self._checkpoints.write(self.policy)

    async def run(self, *, log_exhausted: bool) -> None:
        """Publish the policy if it is due and report the trainer's position. What fails is left for
        a later call.
        """
        writes = self._context.writes
        if writes.due("policy"):
            with writes.trying("policy", _POLICY_REMEDY, OSError, PolicyStoreError, TransportError):
                await self._publish(log_exhausted)
        if writes.due("refusal"):
            remedy = "generators keep the old policy; tried again"
            with writes.trying("refusal", remedy, OSError, PolicyStoreError, TransportError, MessageError):
                await self._answer_refusal()
        with writes.trying("position", "the sampler waits; see to the NATS server; tried again", TransportError):
            await self._announce()
        with writes.trying("findings", "tried again after the next step", TransportError):
            await self.findings.tell(self._context.node, time.time())
        if writes.due("pruning"):
            with writes.trying("pruning", "old policies stay; tried again", PolicyStoreError, TransportError):
                await self._publisher.prune()
        if log_exhausted and self._checkpoints.is_to_be_tried_again:
            await self.checkpoint()

    async def run_when_finished(self) -> None:
        """The same once all steps are taken."""
        if self._checkpoints.is_to_be_tried_again:
            await self.checkpoint()
        writes = self._context.writes
        if writes.due("policy"):
            with writes.trying("policy", _POLICY_REMEDY, OSError, PolicyStoreError, TransportError):
                await self._publish(log_exhausted=True)
        with writes.trying("position", "the sampler waits; see to the NATS server; tried again", TransportError):
            await self._announce(finished=True)

    async def _publish(self, log_exhausted: bool) -> None:
        """Does what `publication` decides for the trained version. `confirm` publishes it once
        more, because only then its hash is known, and with it whether the replay gave the same
        bytes.
        """
        version = self.policy.batch_number
        old = self._publisher.pointer
        decision = publication(version, old.version if old else None, log_exhausted=log_exhausted)
        if decision == "hold" or (decision == "confirm" and self._confirmed == version):
            return
        if decision == "step_back":
            assert old is not None
            self._log.warning(
                "policy_steps_back",
                reason=f"the batch log ends at {version}, but policy {old.version} was published: batches between them are lost",
                consequence=f"generators return to policy {version}",
            )
        await self._publisher.publish(self._write_policy, self.policy)
        self._confirmed = version
        self._note_published(version)
        published = self._publisher.pointer
        assert published is not None
        if decision == "confirm" and old is not None and old.sha256 != published.sha256:
            self._log.warning("policy_published_again", version=version, reason="repeating the batches did not give the same bytes")

    async def _answer_refusal(self) -> None:
        """Publish the newest policy as a full copy if a generator reports that it cannot be
        fetched.
        """
        refusal = await self._publisher.refused(self.policy)
        if refusal is None:
            return
        version = self.policy.batch_number
        self._log.warning(
            "policy_published_whole",
            version=version,
            reason=f"a generator could not fetch policy {refusal.version}: {refusal.reason}",
        )
        self._publisher.begin_again()
        await self._publisher.publish(self._write_policy, self.policy)
        self._note_published(version)

    def _note_published(self, version: int) -> None:
        published = self._publisher.pointer
        assert published is not None
        self._gauges.published(published)
        sent_kind, sent_bytes = self._publisher.sent_kind, self._publisher.sent_bytes
        self._log.info("policy_published", version=version, sent=sent_kind, sent_bytes=sent_bytes)
        self._tell_rounding(self._learner.delta_rounding, version)
        self._context.status.set(StatusFigure.POLICY_VERSION, version)

    def _tell_rounding(self, rounding: DeltaRounding | None, version: int) -> None:
        """Export what rounding loses of merged adapters, and warn of much once: early in training
        most of the small delta is lost for many steps. None: nothing is merged yet.
        """
        self._gauges.delta_lost.set(None if rounding is None else rounding.lost_ratio)
        if rounding is None or rounding.lost_ratio <= MUCH or self._warned_of_rounding:
            return
        self._warned_of_rounding = True
        dtype = dtype_name(self._learner.published_dtype)
        self._log.warning(
            "delta_rounded_away",
            version=version,
            dtype=dtype,
            lost_ratio=round(rounding.lost_ratio, 4),
            reason=f"{rounding.unmoved_ratio:.0%} of the adapted weights do not move in {dtype}: less than half a step each",
            consequence="generators sample from a policy without the lost part (swarm_trainer_delta_lost_ratio)",
            remedy=_REMEDY,
        )

    async def _write_policy(self, file: Path) -> None:
        await self._torch.run(lambda: write_tensors(self._learner.policy(), file, self._learner.policy_metadata))

    async def _announce(self, finished: bool = False) -> None:
        position = TrainerPosition(
            policy_version=self.policy.batch_number,
            consumed_local=self.policy.consumed_local,
            finished=finished,
            foreign_logprobs=self._foreign_logprobs,
        )
        if position != self._announced:
            await self._context.node.kv.put(self._bucket, TRAINER_KEY, encode(position))
            self._announced = position
