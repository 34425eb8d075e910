"""Takes local groups from the work queue through the scorer to `scored`, sends them to the swarm,
and then acknowledges them.

A group is acknowledged only after its `ScoredGroup` is stored under the group's id, so the server
drops the duplicate of a second delivery after a crash. An answer whose reward is unknown leaves its
group here. A group without any reward is stored as a `ScoredGroup` with `failure`; so is one that
cannot be scored, and its bytes become a dead letter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from services.verifier.episodes import answers_of, turns_problem, with_replies
from services.verifier.figures import Figures
from services.verifier.rewards import RewardKnowledge, foreign_rewards
from services.verifier.sharing import LocalModel, Outbox
from shared.cancelling import cancel_and_wait
from shared.config.verifier_config import VerifierConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode
from shared.contracts.messages import ROLLOUT_ID_HEADER, RolloutGroup, ScoredGroup, claimed_rollout_id, rollout_id_of
from shared.contracts.wire import MessageError
from shared.dead_letters import bury
from shared.rewards import LocalOnly, known_parts, mean_parts, unknown_of
from shared.runtime.logs import Log
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from shared.tasks.verifiers import VerifierChoice
from shared.transport.base import NotConnected, PubAck, Transport, TransportError
from shared.transport.nats.pull import Delivery, fetch

IN_WORK = 64
FETCH_TIMEOUT_S = 1.0
RETRY_S = 1.0


class LocalScorer:
    """Scores this node's local groups."""

    def __init__(
        self,
        config: VerifierConfig,
        node: Transport,
        pool: ScorerPool,
        scored: LocalOutcomes,
        outbox: Outbox,
        own: LocalModel,
        figures: Figures,
        log: Log,
        rewards: RewardKnowledge,
        note_own: Callable[[RolloutGroup, int], None] = lambda *_: None,
    ) -> None:
        """`note_own` is called with each scored group and its position in the stream of scored
        groups, so that a sender who returns it as its own is recognised.
        """
        self._config = config
        self._choice = VerifierChoice(config.tasks)
        # No node takes these. Of the others each scores the answers with its own reward.
        local_only = self._choice.local_only
        self._unshared = {dataset for dataset, why in local_only.items() if why in (LocalOnly.SCORER, LocalOnly.JUDGED)}
        self._id = config.node.id
        self._node = node
        self._pool = pool
        self._scored = scored
        self._outbox = outbox
        self._own = own
        self._figures = figures
        self._log = log
        self._rewards = rewards
        self._partial_credit = config.verifier.foreign_partial_credit
        self._note_own = note_own
        self._in_work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Score without end. A group that hangs delays the ones behind it only as long as the
        workers allow.
        """
        try:
            while True:
                await self._take_more()
        finally:
            await cancel_and_wait(*self._in_work)

    async def _take_more(self) -> None:
        """Fetches only as many groups as there is room for. Fetched groups are leased from the
        queue, so a replica that fetched more would keep the others idle.
        """
        if len(self._in_work) >= IN_WORK:
            await asyncio.wait(self._in_work, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in self._in_work if task.done()]:
            self._in_work.discard(task)
            task.result()
        stream = subjects.node_rollouts_stream(self._id)
        try:
            room = max(1, IN_WORK - len(self._in_work))
            deliveries = await fetch(self._node, stream, subjects.VERIFIER_CONSUMER, room, FETCH_TIMEOUT_S)
        except TransportError as error:
            self._log.warning("local_groups_unreachable", reason=str(error), retry_s=RETRY_S)
            await asyncio.sleep(RETRY_S)
            return
        self._in_work.update(asyncio.create_task(self._settle(delivery)) for delivery in deliveries)

    async def _settle(self, delivery: Delivery) -> None:
        keeping = asyncio.create_task(self._keep(delivery))
        try:
            await self._score_and_store(delivery)
        except TransportError as error:
            self._log.warning("local_group_delayed", reason=str(error), deliveries=delivery.deliveries, retry_s=RETRY_S)
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
        last_try = delivery.deliveries >= max(2, self._config.verifier.max_deliver)
        try:
            payload = await self._node.payload(delivery.message)
        except NotConnected:
            raise
        except TransportError as error:
            if not last_try:
                raise
            self._log.error("local_group_given_up", seq=delivery.message.seq, cause=str(error))
            await self._scored.bury(b"", str(error), f"lost-{delivery.message.seq}")
            self._figures.scoring.failed_local()
            await delivery.ack()
            return
        try:
            group = decode(payload, RolloutGroup)
        except MessageError as error:
            remedy, rollout_id = "run all of a node's services in one version", claimed_rollout_id(delivery.message.headers)
            self._log.error("local_group_unreadable", reason=str(error), rollout_id=rollout_id, remedy=remedy)
            await self._scored.bury(payload, str(error), content_id(payload))
            self._figures.scoring.failed_local()
            await delivery.ack()
            return
        group_id = content_id(payload)
        self._own.learn(group)
        if last_try:
            # Each earlier attempt ended in a crash or an outage. This one, and each after it, only
            # stores the group as a dead letter.
            await self._scored.give_up(group, payload, f"not scored in {delivery.deliveries - 1} tries")
            await delivery.ack()
            return
        turns = self._choice.turns_for(group.task.ref)
        texts = answers_of(group, turns)
        (result,) = await self._pool.run([ScoringJob(ref=group.task.ref, texts=texts, expected=group.task, urgent=True)])
        problem = f"{result.reason}: {result.detail}" if result.reason is not None else turns_problem(group, result, turns)
        if problem:
            self._figures.scoring.unscored("local", len(texts), result)
            await self._scored.give_up(group, payload, problem)
            await delivery.ack()
            return
        self._rewards.note(group.task.ref, result)
        group, rewards, passed = self._rewards.scored(group, result)
        if not rewards:
            await asyncio.sleep(self._rewards.pause_s)
        unknown, scorer = unknown_of(result.marks), self._rewards.rules.scorer(group.task.ref)
        failure = None if rewards else f"no answer has a reward ({', '.join(unknown)}): {result.detail}"[:500]
        scored = self._scored.scored(
            group,
            group_id,
            rewards,
            result.seconds,
            failure,
            passed=passed,
            unknown=unknown,
            scorer=scorer,
            parts=known_parts(result.parts, result.rewards),
        )
        if turns is not None and rewards:
            scored = with_replies(scored, result, turns)
        stored = await self._scored.store(scored)
        if not stored.duplicate:
            self._figures.scoring.scored("local", group.task.ref.dataset, result)
            if rewards:
                self._say_scored(scored, result, stored.seq)
                self._note_own(group, stored.seq)
        # Also after a crash between storing and sharing; the swarm's stream drops a second copy.
        if rewards and group.task.ref.dataset not in self._unshared:
            theirs = rewards if passed is None or self._partial_credit else foreign_rewards(rewards, passed)
            self._outbox.offer(group, group_id, theirs)
        await delivery.ack()
        self._rewards.refuse_to_go_on()

    def _say_scored(self, scored: ScoredGroup, result: JobResult, seq: int) -> None:
        """Log a group's rewards. seq: its position in the stream of scored groups."""
        group, group_id, rewards = scored.group, scored.group_id, scored.rewards
        several = {"mean_rewards": mean_parts(scored.parts)} if scored.parts else {}
        mean = round(sum(rewards) / len(rewards), 4)
        self._log.info(
            "rollouts_scored",
            rollout_id=rollout_id_of(group_id),
            task=group.task.ref.dataset,
            draw=group.draw,
            policy_version=group.policy_version,
            stream_seq=seq,
            completions=len(rewards),
            mean_reward=mean,
            unknown=len(result.rewards) - len(rewards),
            seconds=round(result.seconds, 4),
            **several,
        )


class LocalOutcomes:
    """Stores the outcomes of local groups, each under its own message id, so that a retry stores
    nothing twice.
    """

    def __init__(self, node_id: str, node: Transport, figures: Figures, log: Log) -> None:
        self._id, self._node, self._figures, self._log = node_id, node, figures, log

    async def give_up(self, group: RolloutGroup, payload: bytes, cause: str) -> None:
        """Store a group as one that could not be scored, and its bytes as a dead letter."""
        group_id = content_id(payload)
        rollout_id, task = rollout_id_of(group_id), group.task.ref.dataset
        self._log.error("local_group_given_up", rollout_id=rollout_id, draw=group.draw, task=task, cause=cause)
        await self.bury(payload, cause, group_id)
        failed = self.scored(group, group_id, [], 0.0, cause[:500])
        if not (await self.store(failed)).duplicate:
            self._figures.scoring.failed_local()

    async def bury(self, payload: bytes, cause: str, message_id: str) -> None:
        """Store a group's bytes as a dead letter; `payload` is empty if they are lost."""
        await bury(self._node, self._id, payload, cause, message_id=message_id)
        self._figures.scoring.buried()

    async def store(self, scored: ScoredGroup) -> PubAck:
        """Store a scored group in the node's stream. A second copy is acknowledged as a
        duplicate.
        """
        subject, stream = subjects.node_scored(self._id), subjects.node_scored_stream(self._id)
        headers = {ROLLOUT_ID_HEADER: rollout_id_of(scored.group_id)}
        return await self._node.publish(subject, encode(scored), stream=stream, message_id=scored.group_id, headers=headers)

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
        scorer: str | None = None,
        parts: Mapping[str, list[float | None]] = MappingProxyType({}),
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
            scorer=scorer,
            parts=dict(parts),
        )
