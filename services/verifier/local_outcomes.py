"""Stores the outcome of a local group: in the stream of scored groups, or as a dead letter."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from services.verifier.figures import Figures
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.messages import RolloutGroup, ScoredGroup
from shared.contracts.rollout_id import ROLLOUT_ID_HEADER, rollout_id_of
from shared.dead_letters import attempt_id, bury
from shared.runtime.logs import Log
from shared.transport.base import PubAck, StoredMessage, Transport


class LocalOutcomes:
    """Stores the outcomes of local groups, each under its own message id, so that a retry stores
    nothing twice.
    """

    def __init__(self, node_id: str, node: Transport, figures: Figures, log: Log) -> None:
        self._id, self._node, self._figures, self._log = node_id, node, figures, log

    async def give_up(self, message: StoredMessage, group: RolloutGroup, payload: bytes, cause: str) -> None:
        """Store a group as one that could not be scored, and its bytes as a dead letter."""
        group_id = content_id(payload)
        rollout_id, task = rollout_id_of(group_id), group.task.ref.dataset
        self._log.error("local_group_given_up", rollout_id=rollout_id, draw=group.draw, task=task, cause=cause)
        await self.bury(message, payload, cause)
        failed = self.scored(group, group_id, [], 0.0, cause[:500])
        if not (await self.store(message, failed)).duplicate:
            self._figures.scoring.failed_local()

    async def bury(self, message: StoredMessage, payload: bytes, cause: str) -> None:
        """Store a group's bytes as a dead letter; `payload` is empty if they are lost."""
        name = attempt_id(message, content_id(payload)) if payload else f"lost-{message.seq}"
        await bury(self._node, self._id, payload, cause, message_id=name)
        self._figures.scoring.buried()

    async def store(self, message: StoredMessage, scored: ScoredGroup) -> PubAck:
        """Store a scored group in the node's stream. A second copy is acknowledged as a
        duplicate.
        """
        subject, stream = subjects.node_scored(self._id), subjects.node_scored_stream(self._id)
        name, headers = attempt_id(message, scored.group_id), {ROLLOUT_ID_HEADER: rollout_id_of(scored.group_id)}
        return await self._node.publish(subject, encode(scored), stream=stream, message_id=name, headers=headers)

    def scored(
        self,
        group: RolloutGroup,
        group_id: str,
        rewards: list[float],
        seconds: float,
        failure: str | None = None,
        *,
        passed: list[bool] | None = None,
        unknown: Mapping[str, int] = MappingProxyType({}),
    ) -> ScoredGroup:
        """The message with a group and its rewards, or with the reason why it has none."""
        return ScoredGroup(
            group_id=group_id,
            origin="local",
            group=group,
            rewards=rewards,
            scored_by=self._id,
            score_seconds=seconds,
            scored_at=time.time(),
            passed=passed,
            unknown=dict(unknown),
            failure=failure,
        )
