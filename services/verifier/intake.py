"""Others' groups: read from the swarm within the budget, checked at the border, scored, and stored in `scored`.

Replicas share the work through a cursor in the node's bucket: who moves it by compare-and-set looks at what it passed.
"""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import Any

import msgpack

from services.verifier.border import Border, Candidate, Refusal, Refused, without_tokens
from services.verifier.figures import Figures
from services.verifier.intake_plan import IntakePlan, TokenBucket, plan_intake
from services.verifier.own_model import OwnModel
from services.verifier.swarm_link import SwarmLink
from shared import subjects
from shared.config import NodeConfig
from shared.messages import ScoredGroup, encode
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from shared.transport.base import Conflict, NotConnected, StoredMessage, Transport, TransportError

BURST_S = 2.0
MAX_READ = 64
IN_WORK = 64
ALLOWED_TIMEOUTS = 1
STORE_ATTEMPTS = 5
RETRY_S = 1.0


class Intake:
    """Takes in foreign groups."""

    def __init__(
        self,
        config: NodeConfig,
        node: Transport,
        link: SwarmLink,
        border: Border,
        pool: ScorerPool,
        own: OwnModel,
        figures: Figures,
        log: Any,
    ) -> None:
        self._config = config
        self._id = config.node.id
        self._node = node
        self._link = link
        self._border = border
        self._pool = pool
        self._own = own
        self._figures = figures
        self._log = log
        rate_per_s = config.verifier.intake_groups_per_s
        self._bucket = TokenBucket(rate_per_s, rate_per_s * BURST_S, time.monotonic())
        self._random = Random()
        self._in_work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look at the swarm for ever; does nothing on a node alone."""
        try:
            while self._config.nats.swarm_url is not None:
                try:
                    more = await self._turn()
                except (TransportError, ValueError, OSError) as error:
                    self._log.warning("intake_delayed", reason=str(error), retry_s=RETRY_S)
                    more = False
                    await asyncio.sleep(RETRY_S)
                if not more:
                    await asyncio.sleep(self._config.verifier.intake_poll_s)
        finally:
            for task in self._in_work:
                task.cancel()
            await asyncio.gather(*self._in_work, return_exceptions=True)

    async def _turn(self) -> bool:
        """Look at what the budget allows now. True when there is more to look at."""
        for task in [task for task in self._in_work if task.done()]:
            self._in_work.discard(task)
            task.result()
        swarm = self._link.transport
        if swarm is None:
            return False
        state = await swarm.stream_state(subjects.SWARM_ROLLOUTS)
        cursor, revision = await self._cursor()
        allowed = min(self._bucket.available(time.monotonic()), MAX_READ, IN_WORK - len(self._in_work))
        plan = plan_intake(
            cursor=cursor,
            first_seq=state.first_seq,
            last_seq=state.last_seq,
            allowed=allowed,
            rate_per_s=self._config.verifier.intake_groups_per_s,
            random=self._random,
        )
        self._figures.backlog(max(0, state.last_seq - max(cursor, state.first_seq - 1)))
        if plan.mode == "idle":
            return False
        try:
            await self._node.kv_update(
                subjects.node_bucket(self._id), subjects.INTAKE_KEY, msgpack.packb(plan.next_cursor), last_revision=revision
            )
        except Conflict:
            return True
        messages = await self._read(swarm, plan, cursor)
        self._bucket.take(len(messages))
        for message in messages:
            if subjects.rollouts_author(message.subject) != self._id:
                self._in_work.add(asyncio.create_task(self._admit(swarm, message)))
        return plan.mode == "follow" and plan.next_cursor < state.last_seq

    async def _cursor(self) -> tuple[int, int]:
        entry = await self._node.kv_get(subjects.node_bucket(self._id), subjects.INTAKE_KEY)
        if entry is None:
            return 0, 0
        cursor = msgpack.unpackb(entry.value)
        return (cursor if isinstance(cursor, int) and cursor >= 0 else 0), entry.revision

    async def _read(self, swarm: Transport, plan: IntakePlan, cursor: int) -> list[StoredMessage]:
        if plan.mode == "draw":
            found = await asyncio.gather(*(swarm.get(subjects.SWARM_ROLLOUTS, seq) for seq in plan.positions))
            return [message for message in found if message is not None]
        messages: list[StoredMessage] = []
        position = cursor + 1 if cursor < plan.next_cursor else 1
        while position <= plan.next_cursor:
            read = await swarm.read(subjects.SWARM_ROLLOUTS, position, min(MAX_READ, plan.next_cursor - position + 1))
            within = [message for message in read if message.seq <= plan.next_cursor]
            messages += within
            if not within:
                break
            position = within[-1].seq + 1
        return messages

    async def _admit(self, swarm: Transport, message: StoredMessage) -> None:
        verdict = self._border.refuse_size(message.subject, message.size_bytes)
        if verdict is not None:
            self._refuse(verdict)
            return
        try:
            payload = await swarm.payload(message)
        except NotConnected as error:
            self._log.warning("intake_delayed", reason=str(error))
            return
        except TransportError as error:
            self._refuse(Refused(Refusal.BLOB_MISSING, subjects.rollouts_author(message.subject), str(error)))
            return
        examined = self._border.examine(message.subject, payload, time.time())
        if isinstance(examined, Refused):
            self._refuse(examined)
            return
        texts = [completion.text for completion in examined.group.completions]
        task = examined.group.task
        (result,) = await self._pool.run([ScoringJob(ref=task.ref, texts=texts, expected=task, max_timeouts=ALLOWED_TIMEOUTS)])
        refused = self._border.conclude(examined, result, time.time())
        if refused is not None:
            self._figures.timeouts(result.timeouts)
            self._refuse(refused)
            return
        await self._store(examined, result)

    async def _store(self, candidate: Candidate, result: JobResult) -> None:
        group = candidate.group if self._own.same_tokenizer(candidate.group) else without_tokens(candidate.group)
        scored = ScoredGroup(
            group_id=candidate.group_id,
            origin="external",
            group=group,
            rewards=result.rewards,
            scored_by=self._id,
            score_seconds=result.seconds,
            scored_at=time.time(),
        )
        payload = encode(scored)
        subject, stream = subjects.node_scored(self._id), subjects.node_scored_stream(self._id)
        for attempt in range(1, STORE_ATTEMPTS + 1):
            try:
                await self._node.publish(subject, payload, stream=stream, message_id=candidate.group_id)
            except TransportError as error:
                self._log.warning("foreign_group_delayed", reason=str(error), attempt=attempt, of=STORE_ATTEMPTS)
                await asyncio.sleep(RETRY_S * attempt)
            else:
                self._figures.accepted(result.seconds, result.timeouts)
                return

    def _refuse(self, refused: Refused) -> None:
        self._figures.refused(refused)
        self._log.debug("foreign_group_refused", reason=refused.reason.value, sender=refused.sender, detail=refused.detail[:300])
