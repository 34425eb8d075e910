"""Reads the swarm's stream according to the intake plan, behind a cursor that the node's replicas
share.

The replica that moves the cursor by compare-and-set takes the messages it passed. If the stream is
too full to be read completely, senders in good standing are asked for their newest group.

Everything is read by direct gets: the server answers requests about streams (`STREAM.INFO`) one
after the other for everybody, so a node that waited for one would wait for whoever asks most. What
is known of the stream is therefore what the messages at and after the cursor tell.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from random import Random
from typing import TypeVar

import structlog

from services.verifier.figures import Figures
from services.verifier.intake_plan import IntakePlan, TokenBucket, plan_intake
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import IntakeCursor
from shared.contracts.wire import MessageError
from shared.transport.base import Conflict, Ends, NotConnected, StoredMessage, Transport, TransportError

T = TypeVar("T")
log = structlog.get_logger(__name__)

BURST_S = 2.0
MAX_READ = 64
LOOKED_AT_AFTER_S = 10.0
"""A stream without news is checked this often for whether it was created anew."""
KNOWN_SUBJECTS = 256
ASKED_SUBJECTS = 16
"""In an overfull stream, this many senders in good standing are asked for their newest group."""


class SwarmReader:
    """The reader of one replica."""

    def __init__(self, config: NodeConfig, node: Transport, figures: Figures) -> None:
        self._id = config.node.id
        self._node = node
        self._figures = figures
        self._rate_per_s = config.verifier.intake_groups_per_s * config.verifier.intake_look_factor
        self._looks = TokenBucket(self._rate_per_s, self._rate_per_s * BURST_S, time.monotonic())
        self._known_subjects: OrderedDict[str, int] = OrderedDict()
        self._random = Random()
        self._looked_at_s = -LOOKED_AT_AFTER_S

    async def read(self, swarm: Transport) -> tuple[list[StoredMessage], bool]:
        """The messages that may be read now, and whether there are more. The backlog is not told
        anew while the budget allows no message: the oldest unread one is read to learn it.

        Raises:
            TransportError: one of the two planes did not answer.
        """
        allowed = min(self._looks.available(time.monotonic()), MAX_READ)
        if allowed <= 0:
            return [], False
        cursor, revision = await self._cursor()
        unread = await self._asked(self._unread(swarm, cursor))
        passed = cursor if cursor <= unread.last_seq else 0
        self._figures.border.backlog(max(0, unread.last_seq - max(passed, unread.first_seq - 1)))
        if unread.first is None:
            return [], False
        plan = self._plan(cursor, unread.first_seq, unread.last_seq, allowed)
        if plan.mode == "draw":
            (oldest,) = await self._asked(swarm.read(subjects.SWARM_ROLLOUTS, 1, 1)) or [unread.first]
            plan = self._plan(cursor, oldest.seq, unread.last_seq, allowed)
        try:
            await self._node.kv.update(
                subjects.node_bucket(self._id),
                subjects.INTAKE_KEY,
                encode(IntakeCursor(position=plan.next_cursor)),
                last_revision=revision,
            )
        except Conflict:
            return [], True
        messages = await self._asked(self._read(swarm, plan, unread))
        self._figures.border.read("gap" if plan.mode == "draw" or 0 < cursor < unread.first_seq - 1 else "ok")
        self._looks.take(len(messages))
        for message in messages:
            if message.subject in self._known_subjects:
                self._known_subjects[message.subject] = max(self._known_subjects[message.subject], message.seq)
        return messages, plan.mode == "follow" and plan.next_cursor < unread.last_seq

    def accepted(self, message: StoredMessage) -> None:
        """Record that a group on this subject was accepted, so that it is worth asking for more."""
        self._known_subjects[message.subject] = max(self._known_subjects.pop(message.subject, 0), message.seq)
        if len(self._known_subjects) > KNOWN_SUBJECTS:
            self._known_subjects.popitem(last=False)

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except NotConnected:
            self._figures.border.read("timeout")
            raise
        except TransportError:
            self._figures.border.read("error")
            raise

    async def _cursor(self) -> tuple[int, int]:
        entry = await self._node.kv.get(subjects.node_bucket(self._id), subjects.INTAKE_KEY)
        if entry is None:
            return 0, 0
        try:
            return decode(entry.value, IntakeCursor).position, entry.revision
        except MessageError as error:
            log.warning("intake_cursor_unreadable", reason=str(error), consequence="reading the stream from its beginning")
            return 0, entry.revision

    async def _unread(self, swarm: Transport, cursor: int) -> Ends:
        """The messages after the cursor; all of a stream that was created anew and has fewer than
        the cursor says, which is looked at only now and then.
        """
        unread, now_s = await swarm.ends(subjects.SWARM_ROLLOUTS, cursor + 1), time.monotonic()
        if unread.first is not None or cursor == 0 or now_s - self._looked_at_s < LOOKED_AT_AFTER_S:
            return unread
        self._looked_at_s = now_s
        newest = await swarm.last(subjects.SWARM_ROLLOUTS, ">")
        if newest is None or newest.seq >= cursor:
            return unread
        return await swarm.ends(subjects.SWARM_ROLLOUTS)

    def _plan(self, cursor: int, first_seq: int, last_seq: int, allowed: int) -> IntakePlan:
        return plan_intake(
            cursor=cursor,
            first_seq=first_seq,
            last_seq=last_seq,
            allowed=allowed,
            rate_per_s=self._rate_per_s,
            random=self._random,
        )

    async def _read(self, swarm: Transport, plan: IntakePlan, unread: Ends) -> list[StoredMessage]:
        """`draw` requests single positions, some of which may be gone; `follow` reads a range, of
        which the ends are there already.
        """
        if plan.mode == "draw":
            drawn = await _answered([swarm.get(subjects.SWARM_ROLLOUTS, seq) for seq in plan.positions])
            found = {message.seq: message for message in drawn if message is not None}
            return list((found | await self._newest_of_known(swarm)).values())
        messages = [message for message in (unread.first,) if message is not None and message.seq <= plan.next_cursor]
        last = [message for message in (unread.last,) if message is not None and message.seq == plan.next_cursor]
        position, end = unread.first_seq + 1, plan.next_cursor - len(last)
        while position <= end:
            read = await swarm.read(subjects.SWARM_ROLLOUTS, position, min(MAX_READ, end - position + 1))
            within = [message for message in read if message.seq <= end]
            messages += within
            if not within:
                break
            position = within[-1].seq + 1
        return messages if messages[-1:] == last else messages + last

    async def _newest_of_known(self, swarm: Transport) -> dict[int, StoredMessage]:
        known = self._random.sample(list(self._known_subjects), min(ASKED_SUBJECTS, len(self._known_subjects)))
        newest = await _answered([swarm.last(subjects.SWARM_ROLLOUTS, subject) for subject in known])
        return {
            message.seq: message
            for subject, message in zip(known, newest, strict=True)
            if message is not None and message.seq > self._known_subjects[subject]
        }


async def _answered(asked: Sequence[Awaitable[StoredMessage | None]]) -> list[StoredMessage | None]:
    """The replies in order, with None for a failed request, which does not affect the others. The
    cursor has already moved on.

    Raises:
        TransportError: no request was answered.
    """
    answers = await asyncio.gather(*asked, return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in failed:
        if len(failed) == len(answers) or not isinstance(error, TransportError):
            raise error
    if failed:
        log.warning("messages_not_read", failed=len(failed), asked=len(answers), error=str(failed[0]))
    return [None if isinstance(answer, BaseException) else answer for answer in answers]
