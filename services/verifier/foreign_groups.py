"""Foreign groups: read from the swarm, queued by sender, checked at the border within the budget,
scored, and stored in `scored`.

The verifier reads what the sampler wants and no more (`services.verifier.swarm_reader`, which
replicas share). While one sender's flood waits for its turns (`services.verifier.fair_queue`),
reading goes on, up to `intake_look_factor` times as fast as groups are examined, so that honest
messages are found behind it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from services.verifier.border import Border, Candidate, Refusal, Refused
from services.verifier.episodes import Unpacking, answers_of, with_replies, without_token_ids
from services.verifier.fair_queue import (
    IN_WORK_PER_SENDER,
    MAX_WAITING,
    SMALL_BYTES,
    ClaimedChunks,
    FairQueue,
    InFlightLimit,
    SendingRates,
    beyond_budget,
)
from services.verifier.figures import Figures
from services.verifier.refused_messages import RefusedMessages, RefusedRecord
from services.verifier.rewards import RewardKnowledge
from services.verifier.sharing import LocalModel
from services.verifier.swarm_reader import BURST_S, SwarmLink, SwarmReader
from shared.cancelling import cancel_and_wait, run_until_stopped
from shared.config.verifier_config import VerifierConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.messages import ROLLOUT_ID_HEADER, ScoredGroup, rollout_id_of
from shared.contracts.wire import MessageError
from shared.rewards import is_informative
from shared.runtime.logs import Log
from shared.tasks.sandbox import CROWDED_OUT, JobResult, ScorerPool, ScoringJob
from shared.tasks.verifiers import VerifierChoice
from shared.transport.base import BadReference, NotConnected, StoredMessage, Transport, TransportError

RETRY_S = 1.0
BUSY_S = 0.02
"""Pause while groups wait for their sender's turn."""
SLOW_S = 5.0
"""A group that has been in work for longer does not count as one of those wanted: slow groups of
many senders must not keep a node from reading others.
"""
REFUNDED_BYTES = 2**20
"""If a smaller message is refused cheaply, its turns are refunded, also to the named sender, who
may not have sent it.
"""

FLOODED = "more waits than the budget covers (20 groups a second, half of it for one sender)"

_NOT_THE_SENDERS_DOING = {
    Refusal.TOO_LARGE,
    Refusal.REFERENCE,
    Refusal.MALFORMED,
    Refusal.OTHER_SWARM,
    Refusal.SIGNATURE,
    Refusal.AUTHOR,
    Refusal.TOO_OLD,
    Refusal.REPLAYED,
}

_OF_ANOTHER_VERSION = {Refusal.SCHEMA_VERSION, Refusal.OUT_OF_RANGE}
"""In an envelope, which anybody can write, these cost the named sender nothing. In a signed body
they use its turns, although nobody is blamed.
"""


class ForeignPipeline:
    """Reads, checks, scores and stores foreign groups."""

    def __init__(
        self,
        config: VerifierConfig,
        node: Transport,
        link: SwarmLink,
        border: Border,
        pool: ScorerPool,
        store: ForeignStore,
        figures: Figures,
        log: Log,
        record: RefusedRecord,
    ) -> None:
        self._config = config
        self._id = config.node.id
        self._link = link
        self._border = border
        self._choice = VerifierChoice(config.tasks)
        self._pool = pool
        self._figures = figures
        self._log = log
        self._began_at = time.time()
        verifier, now_s = config.verifier, time.monotonic()
        self._reader = SwarmReader(config, node, figures)
        link.note_sent = self._reader.sent
        self._waiting: FairQueue[StoredMessage] = FairQueue(
            verifier.intake_groups_per_s, verifier.max_sender_share, BURST_S, now_s, verifier.newcomer_share
        )
        self._rates = SendingRates(verifier.intake_groups_per_s * verifier.max_sender_share)
        self._examiner = Examiner(border)
        self._store = store
        self._refused = RefusedMessages(
            figures, log, time.time(), record, lambda name: border.senders.by_name(name, time.time()).known
        )
        self._chunks = ClaimedChunks()
        self._in_work: dict[asyncio.Task[None], float] = {}
        self._in_flight = InFlightLimit()
        self._news = asyncio.Event()

    async def run(self) -> None:
        try:
            await run_until_stopped(asyncio.Event(), self._read_swarm(), self._admit_waiting(), self._tell_floods())
        finally:
            await cancel_and_wait(*self._in_work)
            self._examiner.close()

    async def _read_swarm(self) -> None:
        while True:
            try:
                more = await self._read_once()
            except (TransportError, ValueError, OSError, ArithmeticError) as error:
                self._log.warning("intake_delayed", reason=str(error), retry_s=RETRY_S)
                more = False
                await asyncio.sleep(RETRY_S)
            if not more:
                await asyncio.sleep(self._config.verifier.intake_poll_s)

    async def _tell_floods(self) -> None:
        while True:
            self._figures.border.flood(self._rates.flood_per_s(time.time()))
            await asyncio.sleep(RETRY_S)

    async def _admit_waiting(self) -> None:
        """Starts messages that have a place, then sleeps until something ends or arrives. `news` is
        cleared first, so that what happens meanwhile is not missed. `task.result()` raises failures
        of a group's own task here, because nothing else awaits it.
        """
        while True:
            self._news.clear()
            for task in [task for task in self._in_work if task.done()]:
                del self._in_work[task]
                task.result()
            swarm = self._link.transport
            while swarm is not None and self._in_flight.free:
                found = self._waiting.next(time.monotonic(), self._in_flight.fits())
                if found is None:
                    break
                self._start(swarm, *found)
            self._figures.border.waiting(len(self._waiting))
            self._drop_left_out()
            try:
                async with asyncio.timeout(BUSY_S if len(self._waiting) else RETRY_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _start(self, swarm: Transport, sender: str, message: StoredMessage) -> None:
        self._in_flight.take(sender, message.size_bytes)
        task = asyncio.create_task(self._admit(swarm, sender, message))
        task.add_done_callback(partial(self._finish, sender, message.size_bytes))
        self._in_work[task] = time.monotonic()

    def _finish(self, sender: str, size_bytes: int, _: object) -> None:
        self._in_flight.leave(sender, size_bytes)
        self._news.set()

    def _drop_left_out(self) -> None:
        """Give up the groups of keys that were banned or quarantined while these groups were
        waiting or in progress.
        """
        now_s = time.time()
        for key in self._pool.foreign_senders():
            if self._border.key_problem(key, now_s) is not None:
                self._pool.drop(key)

    async def _read_once(self) -> bool:
        """Read as much as is allowed now. True if there is more to read."""
        swarm = self._link.transport
        if swarm is None:
            return False
        if len(self._waiting) > MAX_WAITING // 2 and self._waiting.may_go_on(time.monotonic(), self._in_flight.fits()):
            # This node was slow for a moment. That is no flood: what waits in the stream stays.
            await asyncio.sleep(BUSY_S)
            return True
        demand = await self._reader.wanted()
        lately = sum(started_s > time.monotonic() - SLOW_S for started_s in self._in_work.values())
        pending = self._waiting.in_turn(IN_WORK_PER_SENDER) + lately + self._store.since(demand.scored_seq)
        messages, more = await self._reader.read(swarm, demand.groups, pending)
        if messages:
            await self._catch_up()
        for message in messages:
            self._enqueue(message)
        if messages:
            self._news.set()
        return more

    async def _catch_up(self) -> None:
        try:
            await self._store.catch_up()
        except TransportError as error:
            self._log.warning(
                "accepted_groups_not_read", reason=str(error), consequence="copies of other verifiers' groups may get in"
            )

    def _enqueue(self, message: StoredMessage) -> None:
        sender = subjects.rollouts_author(message.subject) or ""
        if sender == self._id:
            return
        unread = self._border.refuse_unread(message.subject, message.size_bytes, time.time())
        if unread is not None:
            self._refused.refuse(unread, message)
            return
        claimed = self._border.senders.by_name(sender, time.time())
        if message.stored_at > self._began_at:
            self._rates.add(claimed.account, message.seq, message.stored_at, newcomer=claimed.earned < 1.0)
        # By the time at which the server stored it: what waited while this node was slow was not
        # sent at once.
        lost_ones = self._waiting.offer(
            claimed.account, message, message.size_bytes, time.monotonic(), claimed.earned, sent_at=message.stored_at
        )
        for account, lost in lost_ones:
            author = subjects.rollouts_author(lost.subject)
            reason = self._beyond_budget(author, lost, exceeds=self._waiting.exceeds(account))
            self._refused.refuse(Refused(reason, author, FLOODED), lost)

    def _beyond_budget(self, author: str | None, message: StoredMessage, *, exceeds: bool) -> Refusal:
        earned = self._border.senders.by_name(author, time.time()).earned if author else 0.0
        return beyond_budget(earned, exceeds=exceeds, backlog=message.stored_at <= self._began_at)

    async def _admit(self, swarm: Transport, sender: str, message: StoredMessage) -> None:
        """Process one message from the queue to the scored stream. The border decides twice: on the
        bytes, and after scoring, because another copy of the group may have been accepted
        meanwhile. If that quarantines the key, all its waiting groups are given up.
        """
        examined = await self._examine(swarm, sender, message)
        if examined is None:
            return
        result = await self._score(sender, message.size_bytes, examined)
        if result.reason == CROWDED_OUT:
            reason = self._beyond_budget(examined.sender, message, exceeds=self._waiting.exceeds(sender))
            self._refused.refuse(Refused(reason, examined.sender, result.detail), message, examined)
            return
        await self._catch_up()
        refused = self._border.conclude(examined, result, time.time())
        if refused is not None:
            self._figures.scoring.unscored("external", len(examined.group.completions), result)
            self._refused.refuse(refused, message, examined)
            if refused.quarantined_s:
                self._drop_left_out()
            return
        self._reader.accepted(message)
        self._refused.accepted(examined.sender)
        await self._store.store(examined, result, message.size_bytes)

    async def _score(self, sender: str, size_bytes: int, candidate: Candidate) -> JobResult:
        """Derive the task again and score the answers. Of the group's task only the reference is
        used; the rest must equal the derived one.
        """
        group = candidate.group
        job = ScoringJob(
            ref=group.task.ref,
            texts=answers_of(group, self._choice.turns_for(group.task.ref)),
            expected=group.task,
            sender=candidate.public_key,
            established=self._border.senders.by_key(candidate.public_key, time.time()).established,
            size_bytes=size_bytes,
        )
        with self._in_flight.lent(sender, size_bytes):
            self._news.set()
            (result,) = await self._pool.run([job])
        return result

    async def _examine(self, swarm: Transport, sender: str, message: StoredMessage) -> Candidate | None:
        """Run the checks before scoring. A message that is refused before its answers were looked
        at gives its turn back, and its sender's too unless the sender is to blame.
        """
        author, read = subjects.rollouts_author(message.subject), False
        verdict: Candidate | Refused | None = self._border.refuse_unread(message.subject, message.size_bytes, time.time())
        if verdict is None:
            verdict = self._chunks.refuse(message)
        if verdict is None:
            read = True
            try:
                payload = await swarm.payload(message)
            except TransportError as error:
                if isinstance(error, NotConnected) and not swarm.connected:
                    self._log.warning("intake_delayed", reason=str(error))
                    return None
                reason = Refusal.REFERENCE if isinstance(error, BadReference) else Refusal.BLOB_MISSING
                self._refused.refuse(Refused(reason, author, str(error)), message)
                return None
            verdict = await self._examiner.examine(message.subject, payload, time.time(), message.seq, message.stored_at)
        if isinstance(verdict, Candidate):
            if self._charge_signer(sender, verdict, message.size_bytes):
                return verdict
            reason = self._beyond_budget(verdict.sender, message, exceeds=True)  # its key has used up its turns
            verdict = Refused(reason, verdict.sender, FLOODED)
        self._refused.refuse(verdict, message)
        if not read or (message.inline is not None and message.size_bytes < REFUNDED_BYTES and not verdict.costly):
            unsigned = not verdict.group_id and verdict.reason in _OF_ANOTHER_VERSION
            blameless = verdict.blamed is None and (unsigned or verdict.reason in _NOT_THE_SENDERS_DOING)
            self._waiting.refund(sender, blameless=blameless, size_bytes=message.size_bytes)
            self._news.set()
        return None

    def _charge_signer(self, account: str, candidate: Candidate, size_bytes: int) -> bool:
        """Charge a message under an unclaimed name (`account`) to the key that signed it; otherwise
        many names would multiply the key's share. Return False if its budget is used up.

        If the key has the name by now, the rest of what waits under it moves to the key's queue,
        and the few messages that were already on their way are paid for later.
        """
        if account != candidate.sender:
            return True
        now_s, signer = time.monotonic(), self._border.senders.by_key(candidate.public_key, time.time())
        owned = self._border.senders.by_name(account, time.time()).account == signer.account
        if owned:
            self._waiting.move(account, signer.account, now_s, signer.earned)
        return self._waiting.charge(signer.account, now_s, signer.earned, size_bytes, on_credit=owned)


AT_ONCE_BYTES = 8 * 1024


class Examiner:
    """Drives `Border.examination` without blocking local groups: payloads that may take longer than
    a millisecond are processed in a thread.

    There is one thread, so that all strangers together use at most one processor. The border's
    memories are changed only in the event loop; later checks see what changed there while the
    thread was working.
    """

    def __init__(self, border: Border) -> None:
        self._border = border
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="examiner")

    async def examine(self, subject: str, payload: bytes, now_s: float, seq: int, stored_at_s: float) -> Candidate | Refused:
        """All checks before scoring; arguments as in `Border.examination`. Small messages are
        examined here at once.
        """
        examination, result = self._border.examination(subject, payload, now_s, seq, stored_at_s), None
        while True:
            try:
                work = examination.send(result)
            except StopIteration as done:
                verdict: Candidate | Refused = done.value
                return verdict
            at_once = len(payload) <= AT_ONCE_BYTES and not isinstance(work, Unpacking)
            result = work() if at_once else await self._apart(work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _apart(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


STORE_ATTEMPTS = 5
STORE_RETRY_S = 1.0
LEARNT_AT_START = 512
"""How many of the newest groups a verifier learns when it starts."""
READ_AT_ONCE = 64
OWN_IDS = 4096
LOOKED_AT_AFTER_S = 60.0
"""A stream without news is checked this often for whether it was created anew."""


class ForeignStore:
    """Stores accepted foreign groups where the sampler finds them, and learns from the same stream
    what the node's other verifiers have accepted.

    Each verifier has its own memories of copies, replays and names, and reads in this stream what
    it did not store itself, so that a copy does not get in at the next replica. Of a group and its
    copy that two replicas accept within the same few milliseconds, both get in; the copy's key is
    then blamed.
    """

    def __init__(
        self,
        config: VerifierConfig,
        node: Transport,
        border: Border,
        own: LocalModel,
        rewards: RewardKnowledge,
        figures: Figures,
        log: Log,
    ) -> None:
        self._rewards = rewards
        self._takes_demonstrations = config.verifier.demonstrations
        self._choice = VerifierChoice(config.tasks)
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
        self._external: deque[int] = deque(maxlen=MAX_WAITING)
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

    def since(self, seq: int) -> int:
        """Count the foreign groups that this process has stored after `seq`."""
        return sum(stored > seq for stored in self._external)

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
            made = await asyncio.to_thread(self._border.copies.fingerprint_of, scored.group)
            self._border.learn(scored, made, time.time())

    async def store(self, candidate: Candidate, result: JobResult, size_bytes: int) -> None:
        """Store a group that the border has accepted. Gives up after `STORE_ATTEMPTS`.
        `size_bytes`: of its message.
        """
        signer = self._border.senders.by_key(candidate.public_key, time.time())
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
            account=signer.account,
            established=signer.established,
            public_key=candidate.public_key,
            swarm_seq=candidate.seq,
            swarm_stored_at=candidate.stored_at_s,
            scorer=self._rewards.rules.scorer(group.task.ref),
            demonstration=self._takes_demonstrations and bool(passed) and all(passed or ()) and not is_informative(rewards),
        )
        if (turns := self._choice.turns_for(group.task.ref)) is not None:
            scored = with_replies(scored, result, turns)
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
                await asyncio.sleep(STORE_RETRY_S * attempt)
            else:
                self.stored(ack.seq)
                self._external.append(ack.seq)
                self._figures.border.accepted(group.task.ref.dataset, result)
                mean = round(sum(rewards) / len(rewards), 4)
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
