"""Stores accepted foreign groups where the sampler finds them, and learns from the same stream what
the node's other verifiers have accepted.

The stream of scored groups is the one memory that all of a node's verifiers have in common. Each
has its own memories of copies, replays and names, and reads there what it did not store itself, so
that a copy does not get in at the next replica. Of a group and its copy that two replicas accept
within the same few milliseconds, both get in; the copy's key is then blamed.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

from services.verifier.border import Border, Candidate, without_token_ids
from services.verifier.claims import SMALL_BYTES
from services.verifier.figures import Figures
from services.verifier.own_model import OwnModel
from services.verifier.rewards import RewardKnowledge
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.messages import ScoredGroup
from shared.contracts.rollout_id import ROLLOUT_ID_HEADER, rollout_id_of
from shared.contracts.wire import MessageError
from shared.runtime import spans
from shared.runtime.logs import Log
from shared.tasks.sandbox import JobResult
from shared.transport.base import StoredMessage, Transport, TransportError

STORE_ATTEMPTS = 5
RETRY_S = 1.0
LEARNT_AT_START = 512
"""How many of the newest groups a verifier learns when it starts."""
READ_AT_ONCE = 64
OWN_IDS = 4096
LOOKED_AT_AFTER_S = 60.0
"""A stream without news is checked this often for whether it was created anew."""


class ForeignStore:
    """Foreign groups in the node's stream of scored groups."""

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
        self._stream = subjects.node_scored_stream(config.node.id)
        self._next = 0
        self._looked_at_s = -LOOKED_AT_AFTER_S
        self._stored: set[int] = set()
        self._own_ids: OrderedDict[str, None] = OrderedDict()
        self._learning = asyncio.Lock()

    def stored(self, seq: int) -> None:
        """This process stored the message at `seq`, so it knows it. What it stores one after the
        other is not read at all.
        """
        if seq == self._next:
            self._next += 1
        elif seq > self._next > 0:
            self._stored.add(seq)

    async def catch_up(self) -> None:
        """Learn what others have stored since the last time. Raises TransportError."""
        async with self._learning:
            if time.monotonic() - self._looked_at_s > LOOKED_AT_AFTER_S:
                newest = (await self._node.stream_state(self._stream)).last_seq
                self._looked_at_s = time.monotonic()
                if not self._next or newest + 1 < self._next:
                    self._next, self._stored = max(1, newest + 1 - LEARNT_AT_START), set()
            while messages := await self._node.read(self._stream, self._next, READ_AT_ONCE):
                for message in messages:
                    if message.seq not in self._stored:
                        await self._learn(message)
                    self._next = max(self._next, message.seq + 1)
                self._stored = {seq for seq in self._stored if seq >= self._next}

    async def _learn(self, message: StoredMessage) -> None:
        try:
            payload = await self._node.payload(message)
            scored = await asyncio.to_thread(decode, payload, ScoredGroup)
        except (TransportError, MessageError) as error:
            self._log.warning(
                "accepted_group_not_learnt", seq=message.seq, reason=str(error), consequence="a copy of it may get in"
            )
            return
        # This process may read what it stored before it is told where that is.
        if scored.failure is None and scored.group_id not in self._own_ids:
            made = await asyncio.to_thread(self._border.print_of, scored.group)
            self._border.learn(scored, made, time.time())

    async def store(self, candidate: Candidate, result: JobResult, size_bytes: int) -> None:
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
            public_key=candidate.public_key,
            swarm_seq=candidate.seq,
            swarm_stored_at=candidate.stored_at_s,
        )
        large, rollout_id = size_bytes > SMALL_BYTES, rollout_id_of(candidate.group_id)
        payload = await asyncio.to_thread(encode, scored) if large else encode(scored)
        headers = {ROLLOUT_ID_HEADER: rollout_id}
        subject, stream = subjects.node_scored(self._id), self._stream
        self._own_ids[candidate.group_id] = None
        if len(self._own_ids) > OWN_IDS:
            self._own_ids.popitem(last=False)
        for attempt in range(1, STORE_ATTEMPTS + 1):
            try:
                ack = await self._node.publish(subject, payload, stream=stream, message_id=candidate.group_id, headers=headers)
            except TransportError as error:
                self._log.warning(
                    "foreign_group_delayed", rollout_id=rollout_id, reason=str(error), attempt=attempt, of=STORE_ATTEMPTS
                )
                await asyncio.sleep(RETRY_S * attempt)
            else:
                self.stored(ack.seq)
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
                    swarm_seq=candidate.seq,
                    stream_seq=ack.seq,
                    completions=len(rewards),
                    mean_reward=mean,
                    seconds=round(result.seconds, 4),
                )
                return
