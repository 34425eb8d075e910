"""Stores accepted foreign groups where the sampler finds them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from services.verifier.border import Border, Candidate, without_token_ids
from services.verifier.claims import SMALL_BYTES
from services.verifier.figures import Figures
from services.verifier.own_model import OwnModel
from services.verifier.rewards import RewardKnowledge
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.messages import ScoredGroup
from shared.contracts.rollout_id import ROLLOUT_ID_HEADER, rollout_id_of
from shared.runtime import spans
from shared.runtime.logs import Log
from shared.tasks.sandbox import JobResult
from shared.transport.base import Transport, TransportError

STORE_ATTEMPTS = 5
RETRY_S = 1.0


class ForeignStore:
    """Stores foreign groups in the node's stream of scored groups."""

    def __init__(
        self,
        config: NodeConfig,
        node: Transport,
        border: Border,
        own: OwnModel,
        rewards: RewardKnowledge,
        figures: Figures,
        log: Log,
    ) -> None:
        self._rewards = rewards
        self._id = config.node.id
        self._node = node
        self._border = border
        self._own = own
        self._figures = figures
        self._log = log

    async def store(self, candidate: Candidate, result: JobResult, swarm_seq: int, size_bytes: int) -> None:
        """Store a group that the border has accepted. Gives up after `STORE_ATTEMPTS`.
        `size_bytes`: of its message.
        """
        signer = self._border.signer(candidate.public_key, time.time())
        group = candidate.group if self._own.same_tokenizer(candidate.group) else without_token_ids(candidate.group)
        rewards, passed = self._rewards.foreign(group.task.ref, result)
        scored = ScoredGroup(
            group_id=candidate.group_id,
            origin="external",
            group=group,
            rewards=rewards,
            passed=passed,
            scored_by=self._id,
            score_seconds=result.seconds,
            scored_at=time.time(),
            share=signer.share,
            established=signer.established,
        )
        large, rollout_id = size_bytes > SMALL_BYTES, rollout_id_of(candidate.group_id)
        payload = await asyncio.to_thread(encode, scored) if large else encode(scored)
        headers = {ROLLOUT_ID_HEADER: rollout_id}
        subject, stream = subjects.node_scored(self._id), subjects.node_scored_stream(self._id)
        for attempt in range(1, STORE_ATTEMPTS + 1):
            try:
                ack = await self._node.publish(subject, payload, stream=stream, message_id=candidate.group_id, headers=headers)
            except TransportError as error:
                self._log.warning(
                    "foreign_group_delayed", rollout_id=rollout_id, reason=str(error), attempt=attempt, of=STORE_ATTEMPTS
                )
                await asyncio.sleep(RETRY_S * attempt)
            else:
                self._figures.border.accepted(group.task.ref.dataset, result)
                mean = round(sum(rewards) / len(rewards), 4)
                known: dict[str, Any] = {"sender": candidate.sender, "mean_reward": mean, "outcome": "accepted"}
                spans.emit(candidate.group_id, spans.BORDER, seconds=result.seconds, **known)
                self._log.info(
                    "foreign_rollouts_accepted",
                    rollout_id=rollout_id,
                    sender=candidate.sender,
                    task=group.task.ref.dataset,
                    policy_version=group.policy_version,
                    swarm_seq=swarm_seq,
                    stream_seq=ack.seq,
                    completions=len(rewards),
                    mean_reward=mean,
                    seconds=round(result.seconds, 4),
                )
                return
