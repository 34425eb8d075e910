"""Local groups: from the work queue through the scorer to `scored`, then to the swarm, then acknowledged.

A group is acknowledged only when its `ScoredGroup` is stored, under the group's id, so that a second delivery after a crash is a
duplicate that the server drops. What cannot be scored is stored as a `ScoredGroup` with `failure`, and its bytes as a dead letter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from services.verifier.figures import Figures
from services.verifier.own_model import OwnModel
from services.verifier.sharing import Outbox
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode
from shared.contracts.messages import RolloutGroup, ScoredGroup
from shared.contracts.rollout_id import ROLLOUT_ID_HEADER, claimed_rollout_id, rollout_id_of
from shared.contracts.wire import MessageError
from shared.dead_letters import attempt_id, bury, spent_seq
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from shared.transport.base import Delivery, NotConnected, PubAck, StoredMessage, Transport, TransportError

IN_WORK = 64
FETCH_TIMEOUT_S = 1.0
RETRY_S = 1.0
NOTICES_PERIOD_S = 2.0
SWEPT = 16
"""Oldest groups that one sweep looks at."""


class LocalScorer:
    """Scores this node's local groups."""

    def __init__(
        self,
        config: NodeConfig,
        node: Transport,
        pool: ScorerPool,
        outbox: Outbox,
        own: OwnModel,
        figures: Figures,
        log: Any,
        note_own: Callable[[RolloutGroup], None] = lambda _: None,
    ) -> None:
        """`note_own` is told of each scored group, so that who sends it back as his own is known."""
        self._config = config
        self._id = config.node.id
        self._node = node
        self._pool = pool
        self._outbox = outbox
        self._own = own
        self._figures = figures
        self._log = log
        self._note_own = note_own
        self._in_work: set[asyncio.Task[None]] = set()
        self._seen_since: dict[int, float] = {}

    async def run(self) -> None:
        """Score for ever. A group that hangs does not delay those behind it beyond what the workers allow."""
        try:
            while True:
                await self._take_more()
        finally:
            await cancel_and_wait(*self._in_work)

    async def _take_more(self) -> None:
        if len(self._in_work) >= IN_WORK:
            await asyncio.wait(self._in_work, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in self._in_work if task.done()]:
            self._in_work.discard(task)
            task.result()
        stream = subjects.node_rollouts_stream(self._id)
        try:
            room = max(1, IN_WORK - len(self._in_work))
            deliveries = await self._node.fetch(stream, subjects.VERIFIER_CONSUMER, room, FETCH_TIMEOUT_S)
        except TransportError as error:
            self._log.warning("own_groups_unreachable", reason=str(error), retry_s=RETRY_S)
            await asyncio.sleep(RETRY_S)
            return
        self._in_work.update(asyncio.create_task(self._settle(delivery)) for delivery in deliveries)

    async def _settle(self, delivery: Delivery) -> None:
        keeping = asyncio.create_task(self._keep(delivery))
        try:
            await self._score_and_store(delivery)
        except TransportError as error:
            self._log.warning("own_group_delayed", reason=str(error), deliveries=delivery.deliveries, retry_s=RETRY_S)
            with suppress(TransportError):
                await delivery.nak(RETRY_S)
        finally:
            await cancel_and_wait(keeping)

    async def _keep(self, delivery: Delivery) -> None:
        while True:
            await asyncio.sleep(self._config.verifier.ack_wait_s / 3)
            with suppress(TransportError):
                await delivery.in_progress()

    async def _score_and_store(self, delivery: Delivery) -> None:
        payload = await self._node.payload(delivery.message)
        try:
            group = decode(payload, RolloutGroup)
        except MessageError as error:
            remedy, rollout_id = "run all of a node's services in one version", claimed_rollout_id(delivery.message.headers)
            self._log.error("own_group_unreadable", reason=str(error), rollout_id=rollout_id, remedy=remedy)
            await self._bury(delivery.message, payload, str(error))
            self._figures.failed_local()
            await delivery.ack()
            return
        group_id = content_id(payload)
        self._own.learn(group)
        if delivery.deliveries >= self._config.verifier.max_deliver > 1:
            # Each earlier try ended in a crash or an outage; the last one is used to put the group away safely.
            await self._give_up(delivery.message, group, payload, f"not scored in {delivery.deliveries - 1} tries")
            await delivery.ack()
            return
        texts = [completion.text for completion in group.completions]
        (result,) = await self._pool.run([ScoringJob(ref=group.task.ref, texts=texts, expected=group.task, urgent=True)])
        if result.reason is not None:
            self._figures.unscored("local", len(texts), result)
            await self._give_up(delivery.message, group, payload, f"{result.reason}: {result.detail}")
            await delivery.ack()
            return
        stored = await self._store(delivery.message, self._scored(group, group_id, result))
        if not stored.duplicate:
            self._figures.scored_local(group.task.ref.dataset, result)
            self._say_scored(group, group_id, result, stored.seq)
            self._note_own(group)
        # Also after a crash between storing and sharing; the swarm's stream drops a second copy.
        self._outbox.offer(group, group_id, result.rewards)
        await delivery.ack()

    async def sweep(self) -> None:
        """For ever: put away groups that were handed out too often and are invisible to everybody but the stream."""
        period_s = max(5.0, self._config.verifier.ack_wait_s / 2)
        swept_s = time.monotonic()
        while True:
            await asyncio.sleep(NOTICES_PERIOD_S)
            try:
                await self.put_away_spent()
                if time.monotonic() - swept_s >= period_s:
                    swept_s = time.monotonic()
                    await self.sweep_once(time.time())
            except TransportError as error:
                self._log.warning("sweep_delayed", reason=str(error))

    async def put_away_spent(self) -> int:
        """Put away the groups whose deliveries are used up by the server's own notices, which it keeps. Returns how many."""
        stream, notices_stream = subjects.node_rollouts_stream(self._id), subjects.node_spent_stream(self._id)
        notices = await self._node.read(notices_stream, 1, SWEPT)
        count = 0
        for notice in notices:
            message = await self._node.get(stream, spent_seq(notice.inline or b""))
            # A message that is younger than the notice lies in a stream that was made anew.
            if message is not None and message.stored_at < notice.stored_at:
                await self._put_away(stream, message)
                count += 1
        if notices:
            await self._node.purge(notices_stream, notices[-1].seq)
        return count

    async def sweep_once(self, now_s: float) -> int:
        """Put away what was handed out and not settled for longer than all its tries can take. Returns how many groups.

        For what the notices miss: the server gives one only when somebody asks for more. A consumer delivers in order, so that all
        but the newest `pending` were handed out at least once.
        """
        stream = subjects.node_rollouts_stream(self._id)
        state = await self._node.stream_state(stream)
        lag = await self._node.consumer_state(stream, subjects.VERIFIER_CONSUMER)
        handed_out = min(state.messages - lag.pending, SWEPT)
        messages = await self._node.read(stream, state.first_seq, handed_out) if handed_out > 0 else []
        self._seen_since = {message.seq: self._seen_since.get(message.seq, now_s) for message in messages}
        longest_s = self._config.verifier.ack_wait_s * self._config.verifier.max_deliver
        expired = [message for message in messages if now_s - self._seen_since[message.seq] > longest_s]
        for message in expired:
            await self._put_away(stream, message)
        return len(expired)

    async def _put_away(self, stream: str, message: StoredMessage) -> None:
        unreadable = ""
        try:
            payload = await self._node.payload(message)
        except NotConnected:
            raise
        except TransportError as error:
            payload, unreadable = b"", str(error)
        try:
            await self._give_up(message, decode(payload, RolloutGroup), payload, "handed out too often")
        except MessageError as error:
            self._log.error("own_group_given_up", seq=message.seq, cause=unreadable or str(error))
            await self._bury(message, payload, unreadable or str(error))
            self._figures.failed_local()
        await self._node.delete(stream, message.seq)

    async def _give_up(self, message: StoredMessage, group: RolloutGroup, payload: bytes, cause: str) -> None:
        group_id = content_id(payload)
        rollout_id, task = rollout_id_of(group_id), group.task.ref.dataset
        self._log.error("own_group_given_up", rollout_id=rollout_id, draw=group.draw, task=task, cause=cause)
        await self._bury(message, payload, cause)
        failed = self._scored(group, group_id, JobResult([], None, "failed", cause, 0, 0.0), failure=cause[:500])
        if not (await self._store(message, failed)).duplicate:
            self._figures.failed_local()

    async def _bury(self, message: StoredMessage, payload: bytes, cause: str) -> None:
        name = attempt_id(message, content_id(payload)) if payload else f"lost-{message.seq}"
        await bury(self._node, self._id, payload, cause, message_id=name)
        self._figures.buried()

    async def _store(self, message: StoredMessage, scored: ScoredGroup) -> PubAck:
        subject, stream = subjects.node_scored(self._id), subjects.node_scored_stream(self._id)
        name, headers = attempt_id(message, scored.group_id), {ROLLOUT_ID_HEADER: rollout_id_of(scored.group_id)}
        return await self._node.publish(subject, encode(scored), stream=stream, message_id=name, headers=headers)

    def _say_scored(self, group: RolloutGroup, group_id: str, result: JobResult, seq: int) -> None:
        self._log.info(
            "rollouts_scored",
            rollout_id=rollout_id_of(group_id),
            task=group.task.ref.dataset,
            draw=group.draw,
            policy_version=group.policy_version,
            stream_seq=seq,
            completions=len(result.rewards),
            mean_reward=round(sum(result.rewards) / len(result.rewards), 4),
            timeouts=result.timeouts,
            seconds=round(result.seconds, 4),
        )

    def _scored(self, group: RolloutGroup, group_id: str, result: JobResult, failure: str | None = None) -> ScoredGroup:
        return ScoredGroup(
            group_id=group_id,
            origin="local",
            group=group,
            rewards=result.rewards,
            scored_by=self._id,
            score_seconds=result.seconds,
            scored_at=time.time(),
            failure=failure,
        )
