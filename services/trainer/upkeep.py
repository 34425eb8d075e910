"""Publishes what accompanies the trainer's steps: policies, its position, its findings. A failure
is retried the next time.
"""

from __future__ import annotations

import time
from pathlib import Path

from services.trainer.durable.delta_report import DeltaReport
from services.trainer.durable.keeper import CheckpointKeeper, dtype_name
from services.trainer.durable.publish import Publisher, publication
from services.trainer.figures import TrainerGauges
from services.trainer.findings import Findings
from services.trainer.learner import Learner
from services.trainer.state import TrainedPosition
from services.trainer.torch_thread import TorchThread
from shared.config import NodeConfig
from shared.contracts.codec import encode
from shared.contracts.control import TrainerPosition
from shared.contracts.status_figures import StatusFigure
from shared.contracts.subjects import TRAINER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.model.weights import write_tensors
from shared.policy_store import PolicyStoreError, open_policy_store
from shared.runtime import FatalError, ServiceContext
from shared.transport.base import TransportError

_POLICY_REMEDY = "generators keep the old policy; free space at policy_store.uri or see to the NATS server; tried again"


class Upkeep:
    """Everything that is written after a step, and retried while waiting for the next batch.

    position: the last batch trained on. findings: what the steps found out about senders.
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
                anchor_every=config.policy_store.anchor_every,
            ),
            context.node,
            node=node,
            staging=config.node.run_dir / "publishing",
            keep=config.policy_store.keep,
        )
        self.position = TrainedPosition()
        self.findings = Findings(node)
        self._confirmed: int | None = None
        self._announced: TrainerPosition | None = None
        self._delta_report = DeltaReport(gauges.delta_lost, context.log)

    async def begin(self) -> None:
        """Read what is published, and log where training resumes."""
        try:
            await self._publisher.read_pointer()
        except MessageError as error:
            raise FatalError(f"the policy pointer cannot be read ({error}): run the same version of all services") from None
        await self._announce()

    async def checkpoint(self) -> None:
        """Write a checkpoint now."""
        await self._checkpoints.write(self.position)

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
        version = self.position.batch_number
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
        await self._publisher.publish(self._write_policy, self.position)
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
        refusal = await self._publisher.refused(self.position)
        if refusal is None:
            return
        version = self.position.batch_number
        self._log.warning(
            "policy_published_whole",
            version=version,
            reason=f"a generator could not fetch policy {refusal.version}: {refusal.reason}",
        )
        self._publisher.begin_again()
        await self._publisher.publish(self._write_policy, self.position)
        self._note_published(version)

    def _note_published(self, version: int) -> None:
        published = self._publisher.pointer
        assert published is not None
        self._gauges.published(published)
        sent_kind, sent_bytes = self._publisher.sent_kind, self._publisher.sent_bytes
        self._gauges.published_bytes.labels(sent_kind).inc(sent_bytes)
        self._log.info("policy_published", version=version, sent=sent_kind, sent_bytes=sent_bytes)
        self._delta_report.published(self._learner.delta_rounding, version=version, dtype=dtype_name(self._learner.published_dtype))
        self._context.status.set(StatusFigure.POLICY_VERSION, version)

    async def _write_policy(self, file: Path) -> None:
        await self._torch.run(lambda: write_tensors(self._learner.policy(), file, self._learner.policy_metadata))

    async def _announce(self, finished: bool = False) -> None:
        position = TrainerPosition(
            policy_version=self.position.batch_number,
            consumed_local=self.position.consumed_local,
            finished=finished,
        )
        if position != self._announced:
            await self._context.node.kv.put(self._bucket, TRAINER_KEY, encode(position))
            self._announced = position
