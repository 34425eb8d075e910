"""Foreign groups: read from the swarm, queued by sender, checked at the border within the budget,
scored, and stored in `scored`.

Replicas share the work (`services.verifier.swarm_reader`). Reading is `intake_look_factor` times
faster than the budget, so that honest messages are found behind one sender's flood
(`services.verifier.fair_queue`); a larger flood is sampled.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from services.verifier.border import Border, Candidate
from services.verifier.claims import ClaimedChunks
from services.verifier.examiner import Examiner
from services.verifier.fair_queue import MAX_WAITING, FairQueue
from services.verifier.figures import Figures
from services.verifier.foreign_store import ForeignStore
from services.verifier.own_model import OwnModel
from services.verifier.places import Places
from services.verifier.refusals import Refusal, Refused, beyond_budget
from services.verifier.refused_messages import RefusedMessages
from services.verifier.refused_record import RefusedRecord
from services.verifier.rewards import RewardKnowledge
from services.verifier.swarm_link import SwarmLink
from services.verifier.swarm_reader import BURST_S, SwarmReader
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.runtime import run_until_stopped
from shared.runtime.logs import Log
from shared.tasks.sandbox import CROWDED_OUT, JobResult, ScorerPool, ScoringJob
from shared.transport.base import BadReference, NotConnected, StoredMessage, Transport, TransportError

RETRY_S = 1.0
BUSY_S = 0.02
"""Pause while groups wait for their sender's turn."""
REFUNDED_BYTES = 2**20
"""If a smaller message is refused cheaply, its turns are refunded, also to the named sender, who
may not have sent it.
"""

FLOODED = "more waits than the budget covers (verifier.intake_groups_per_s, verifier.max_sender_share, verifier.newcomer_share)"

_NOT_THE_SENDERS_DOING = {
    Refusal.TOO_LARGE,
    Refusal.REFERENCE,
    Refusal.MALFORMED,
    Refusal.OTHER_SWARM,
    Refusal.SIGNATURE,
    Refusal.AUTHOR,
    Refusal.TOO_OLD,
    Refusal.REPLAYED,
    Refusal.COPIED,
}


class Intake:
    """Reads, checks, scores and stores foreign groups."""

    def __init__(
        self,
        config: NodeConfig,
        node: Transport,
        link: SwarmLink,
        border: Border,
        pool: ScorerPool,
        own: OwnModel,
        rewards: RewardKnowledge,
        figures: Figures,
        log: Log,
        record: RefusedRecord,
    ) -> None:
        self._config = config
        self._id = config.node.id
        self._link = link
        self._border = border
        self._pool = pool
        self._figures = figures
        self._log = log
        self._began_at = time.time()
        verifier, now_s = config.verifier, time.monotonic()
        self._reader = SwarmReader(config, node, figures)
        self._waiting: FairQueue[StoredMessage] = FairQueue(
            verifier.intake_groups_per_s, verifier.max_sender_share, BURST_S, now_s, verifier.newcomer_share
        )
        self._examiner = Examiner(border)
        self._store = ForeignStore(config, node, border, own, rewards, figures, log)
        self._refused = RefusedMessages(figures, log, time.time(), record, lambda name: border.sender(name, time.time()).known)
        self._chunks = ClaimedChunks()
        self._in_work: set[asyncio.Task[None]] = set()
        self._places = Places()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Read the swarm for ever; does nothing on a node without a swarm."""
        if self._config.nats.swarm_url is None:
            return
        try:
            await run_until_stopped(asyncio.Event(), self._read_swarm(), self._admit_waiting())
        finally:
            await cancel_and_wait(*self._in_work)
            self._examiner.close()

    async def _read_swarm(self) -> None:
        while True:
            try:
                more = await self._turn()
            except (TransportError, ValueError, OSError, ArithmeticError) as error:
                self._log.warning("intake_delayed", reason=str(error), retry_s=RETRY_S)
                more = False
                await asyncio.sleep(RETRY_S)
            if not more:
                await asyncio.sleep(self._config.verifier.intake_poll_s)

    async def _admit_waiting(self) -> None:
        """Starts messages that have a place, then sleeps until something ends or arrives. `news` is
        cleared first, so that what happens meanwhile is not missed. `task.result()` raises failures
        of a group's own task here, because nothing else awaits it.
        """
        while True:
            self._news.clear()
            for task in [task for task in self._in_work if task.done()]:
                self._in_work.discard(task)
                task.result()
            swarm = self._link.transport
            while swarm is not None and self._places.free:
                found = self._waiting.next(time.monotonic(), self._places.fits())
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
        self._places.take(sender, message.size_bytes)
        task = asyncio.create_task(self._admit(swarm, sender, message))
        task.add_done_callback(partial(self._worked, sender, message.size_bytes))
        self._in_work.add(task)

    def _worked(self, sender: str, size_bytes: int, _: object) -> None:
        self._places.leave(sender, size_bytes)
        self._news.set()

    def _drop_left_out(self) -> None:
        """Give up the groups of keys that were banned or quarantined while these groups were
        waiting or in progress.
        """
        now_s = time.time()
        for key in self._pool.foreign_senders():
            if self._border.left_out(key, now_s):
                self._pool.drop(key)

    async def _turn(self) -> bool:
        """Read as much as is allowed now. True if there is more to read."""
        swarm = self._link.transport
        if swarm is None:
            return False
        if len(self._waiting) > MAX_WAITING // 2 and self._waiting.may_go_on(time.monotonic(), self._places.fits()):
            # This node was slow for a moment. That is no flood: what waits in the stream stays.
            await asyncio.sleep(BUSY_S)
            return True
        messages, more = await self._reader.read(swarm)
        for message in messages:
            self._line_up(message)
        if messages:
            self._news.set()
        return more

    def _line_up(self, message: StoredMessage) -> None:
        sender = subjects.rollouts_author(message.subject) or ""
        if sender == self._id:
            return
        unread = self._border.refuse_unread(message.subject, message.size_bytes, time.time())
        if unread is not None:
            self._refused.refuse(unread, message)
            return
        claimed = self._border.sender(sender, time.time())
        for _, lost in self._waiting.offer(claimed.share, message, message.size_bytes, time.monotonic(), claimed.earned):
            author = subjects.rollouts_author(lost.subject)
            self._refused.refuse(Refused(self._beyond_budget(author, lost), author, FLOODED), lost)

    def _beyond_budget(self, author: str | None, message: StoredMessage) -> Refusal:
        earned = self._border.sender(author, time.time()).earned if author else 0.0
        return beyond_budget(earned, backlog=message.stored_at <= self._began_at)

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
            reason = self._beyond_budget(examined.sender, message)
            self._refused.refuse(Refused(reason, examined.sender, result.detail), message, examined)
            return
        refused = self._border.conclude(examined, result, time.time())
        if refused is not None:
            self._figures.scoring.unscored("external", len(examined.group.completions), result)
            self._refused.refuse(refused, message, examined)
            if refused.quarantined_s:
                self._drop_left_out()
            return
        self._reader.accepted(message)
        self._refused.accepted(examined.sender)
        await self._store.store(examined, result, message.seq, message.size_bytes)

    async def _score(self, sender: str, size_bytes: int, candidate: Candidate) -> JobResult:
        signer = self._border.signer(candidate.public_key, time.time())
        job = _scoring_job(candidate, size_bytes, established=signer.established)
        with self._places.lent(sender, size_bytes):
            self._news.set()
            (result,) = await self._pool.run([job])
        return result

    async def _examine(self, swarm: Transport, sender: str, message: StoredMessage) -> Candidate | None:
        """The checks before scoring. A message that they refuse costs nobody's budget, except its
        sender's if it is the sender's fault.
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
            if _charged(self._border, self._waiting, sender, verdict, message.size_bytes):
                return verdict
            verdict = Refused(self._beyond_budget(verdict.sender, message), verdict.sender, FLOODED)
        self._refused.refuse(verdict, message)
        if not read or (message.inline is not None and message.size_bytes < REFUNDED_BYTES):
            blameless = verdict.blamed is None and verdict.reason in _NOT_THE_SENDERS_DOING
            self._waiting.refund(sender, blameless=blameless, size_bytes=message.size_bytes)
            self._news.set()
        return None


def _charged(border: Border, waiting: FairQueue[StoredMessage], share: str, candidate: Candidate, size_bytes: int) -> bool:
    """Charges a message that waited under a name of nobody's to the key that signed it, so that
    several names do not multiply the key's share. False if that is used up.

    If the key has the name by now, the rest of what waits under it moves to the key's queue, and
    the few messages that were already on their way are paid for later. `share`: the one that the
    message waited for.
    """
    if share != candidate.sender:
        return True
    now_s, signer = time.monotonic(), border.signer(candidate.public_key, time.time())
    owned = border.sender(share, time.time()).share == signer.share
    if owned:
        waiting.move(share, signer.share, now_s, signer.earned)
    return waiting.charge(signer.share, now_s, signer.earned, size_bytes, on_credit=owned)


def _scoring_job(candidate: Candidate, size_bytes: int, *, established: bool) -> ScoringJob:
    """The job that derives the task again and scores the answers. Of the group's task only the
    reference is used; the rest must equal the derived one.
    """
    task = candidate.group.task
    return ScoringJob(
        ref=task.ref,
        texts=[completion.text for completion in candidate.group.completions],
        expected=task,
        sender=candidate.public_key,
        established=established,
        size_bytes=size_bytes,
    )
