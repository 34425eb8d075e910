"""The verifier's connection to the swarm plane, and its reader of the swarm's stream."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

import structlog

from services.verifier.fair_queue import TokenBucket
from services.verifier.figures import Figures
from shared.config.verifier_config import VerifierConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import IntakeCursor
from shared.contracts.streams import MissingStreams, prepare_swarm_streams
from shared.contracts.wire import MessageError
from shared.runtime import FatalError
from shared.runtime.logs import Log
from shared.runtime.planes import connect_swarm_plane
from shared.transport.base import AccessDenied, Conflict, Ends, NotConnected, StoredMessage, Transport, TransportError

RETRY_S = 2.0
DENIED_RETRY_S = 30.0
"""A server that refuses the key may accept it later; meanwhile the node trains alone."""
CONNECT_TIMEOUT_S = 5.0


class SwarmLink:
    """The connection to the swarm plane, which may be unavailable at the start or at any time. Once
    made, the transport reconnects by itself.
    """

    def __init__(self, config: VerifierConfig, figures: Figures, log: Log) -> None:
        self._config = config
        self._transport: Transport | None = None
        self._figures = figures
        self._log = log
        self._prepared = False
        self._told = ""

    @property
    def transport(self) -> Transport | None:
        """The swarm plane's transport while it can be reached, else None."""
        return self._transport if self._transport is not None and self._transport.connected else None

    @property
    def held(self) -> Transport | None:
        """The transport, even while it has lost its connection."""
        return self._transport

    async def begin(self) -> None:
        """Connect, unless the node is alone. A server that is away is left to `run`.

        Raises:
            FatalError: it refuses this node's key, or lacks streams that this node may not create.
        """
        if self._config.nats.swarm_url is None:
            return
        try:
            await self._connect(min(CONNECT_TIMEOUT_S, self._config.nats.connect_timeout_s))
        except (AccessDenied, MissingStreams) as error:
            raise FatalError(f'{error}; or set nats.swarm_url = "none" to train alone') from None
        except TransportError as error:  # away, full, or it answers what nobody can read: no reason to stop
            self._tell_away(error)
        self._figures.border.connected(self._prepared)

    async def run(self) -> None:
        """Connect in the background, and ensure that the streams exist whenever the swarm plane
        comes back.
        """
        while self._config.nats.swarm_url is not None:
            await asyncio.sleep(RETRY_S)
            before = self._prepared
            self._prepared = before and self.transport is not None
            if not self._prepared:
                await self._try_again()
            if self._prepared != before:
                self._log.info("swarm_plane", connected=self._prepared)
            self._figures.border.connected(self._prepared)

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()

    async def _connect(self, timeout_s: float) -> None:
        """Connect if nothing is connected yet, then prepare the streams. Raises TransportError."""
        nats = self._config.nats
        if self._transport is None:
            self._transport = await connect_swarm_plane(self._config, "verifier", timeout_s=timeout_s)
        await prepare_swarm_streams(self._transport, create=nats.create_streams, replicas=nats.swarm_replicas)
        self._prepared, self._told = True, ""

    async def _try_again(self) -> None:
        if self._transport is not None and not self._transport.connected:
            return
        try:
            await self._connect(CONNECT_TIMEOUT_S)
        except AccessDenied as error:
            self._log.error("swarm_plane_denied", reason=str(error), consequence="training alone", retry_s=DENIED_RETRY_S)
            await asyncio.sleep(DENIED_RETRY_S)
        except TransportError as error:
            self._tell_away(error)

    def _tell_away(self, error: TransportError) -> None:
        if str(error) != self._told:
            self._log.warning("swarm_plane_away", reason=str(error), consequence="training alone until it is back")
        self._told = str(error)


# Decides how many foreign messages to read, and which. Pure; time and randomness are arguments.
#
# In a small swarm, *follow* every message in order. When the backlog is more than the budget
# covers in `CATCH_UP_S`, *draw* random positions of the stream instead and jump to its end, so
# that a node's cost does not grow with the swarm and it sees a fair sample of the window.

CATCH_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class IntakePlan:
    """Decision on what to read now and where to move the shared cursor. Follow: the messages in
    `(cursor, next_cursor]`. Draw: `positions`.
    """

    mode: Literal["idle", "follow", "draw"]
    next_cursor: int
    positions: tuple[int, ...] = ()


def plan_intake(*, cursor: int, first_seq: int, last_seq: int, allowed: int, rate_per_s: float, random: Random) -> IntakePlan:
    """Decide what to read next.

    Args:
        cursor: Everything up to this sequence was examined or skipped.
        first_seq: The oldest message kept.
        last_seq: The newest message. If it is below the cursor, the stream was created anew and is
            followed from its start.
        allowed: How many messages may be read now (`TokenBucket`).
        rate_per_s: The budget, which decides when the backlog is too large to follow.
    """
    if last_seq < cursor:
        cursor = 0
    start = max(cursor + 1, first_seq, 1)
    backlog = last_seq - start + 1
    if backlog <= 0 or allowed <= 0:
        return IntakePlan("idle", cursor)
    if backlog <= max(1.0, rate_per_s * CATCH_UP_S):
        return IntakePlan("follow", min(start + allowed - 1, last_seq))
    oldest = max(first_seq, 1)
    positions = random.sample(range(oldest, last_seq + 1), min(allowed, last_seq - oldest + 1))
    return IntakePlan("draw", last_seq, tuple(sorted(positions)))


T = TypeVar("T")
log = structlog.get_logger(__name__)

BURST_S = 2.0
MAX_READ = 64
READ_S = 30.0
"""How long an answer may take: half of it without a message, which is enough for the largest at 0.6
MB/s.
"""
PASSED_AFTER = 2
"""A message that does not arrive in this many attempts, while the server answers, is passed."""
DRAWN_AT_ONCE = 8
LOOKED_AT_AFTER_S = 60.0
"""A stream without news is checked this often for whether it was created anew."""
KNOWN_SUBJECTS = 256
ASKED_SUBJECTS = 16
"""In an overfull stream, this many senders in good standing are asked for their newest group."""


class SwarmReader:
    """The reader of one replica."""

    def __init__(self, config: VerifierConfig, node: Transport, figures: Figures) -> None:
        self._id = config.node.id
        self._node = node
        self._figures = figures
        self._rate_per_s = config.verifier.intake_groups_per_s * config.verifier.intake_look_factor
        self._looks = TokenBucket(self._rate_per_s, self._rate_per_s * BURST_S, time.monotonic())
        self._known_subjects: OrderedDict[str, int] = OrderedDict()
        self._random = Random()
        self._looked_at_s = -LOOKED_AT_AFTER_S
        self._claimed: list[int] = []
        self._claimed_as: Literal["follow", "draw"] = "follow"
        self._failed = 0

    async def read(self, swarm: Transport) -> tuple[list[StoredMessage], bool]:
        """The messages that may be read now, and whether there are more. The backlog is not told
        anew while the budget allows no message: the oldest unread one is read to learn it.

        Raises:
            TransportError: one of the two planes did not answer.
        """
        if self._claimed:
            return self._noted(await self._asked(self._read_claimed(swarm)), more=True)
        allowed = min(self._looks.available(time.monotonic()), MAX_READ)
        if allowed <= 0:
            return [], False
        cursor, revision = await self._cursor()
        try:
            unread = await self._asked(self._unread(swarm, cursor))
        except NotConnected:
            await self._pass_if_stuck(swarm, cursor, revision)
            raise
        self._failed = 0
        self._figures.border.backlog(unread.messages)
        if unread.first is None:
            return [], False
        last_seq = unread.first_seq + unread.messages - 1
        plan = self._plan(cursor, unread.first_seq, last_seq, allowed)
        if plan.mode == "draw":
            kept = await self._asked(swarm.read(subjects.SWARM_ROLLOUTS, 1, 1, READ_S)) or [unread.first]
            plan = self._plan(cursor, kept[0].seq, last_seq, allowed)
        if not await self._move_cursor(plan.next_cursor, revision):
            return [], True
        self._figures.border.read("gap" if plan.mode == "draw" or 0 < cursor < unread.first_seq - 1 else "ok")
        if plan.mode == "draw":
            self._claimed, self._claimed_as = list(plan.positions), "draw"
            newest = await self._asked(self._newest_of_known(swarm))
            return self._noted(list(newest.values()), more=True)
        self._claimed, self._claimed_as = list(range(unread.first_seq + 1, plan.next_cursor + 1)), "follow"
        return self._noted([unread.first], more=unread.messages > 1)

    def _noted(self, messages: list[StoredMessage], *, more: bool) -> tuple[list[StoredMessage], bool]:
        self._looks.take(len(messages))
        for message in messages:
            if message.subject in self._known_subjects:
                self._known_subjects[message.subject] = max(self._known_subjects[message.subject], message.seq)
        return messages, more

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
        unread = await swarm.ends(subjects.SWARM_ROLLOUTS, cursor + 1, READ_S, newest=False)
        now_s = time.monotonic()
        if unread.first is not None or cursor == 0 or now_s - self._looked_at_s < LOOKED_AT_AFTER_S:
            return unread
        self._looked_at_s = now_s
        newest = await swarm.last(subjects.SWARM_ROLLOUTS, ">")
        if newest is None or newest.seq >= cursor:
            return unread
        return await swarm.ends(subjects.SWARM_ROLLOUTS, 1, READ_S, newest=False)

    async def _pass_if_stuck(self, swarm: Transport, cursor: int, revision: int) -> None:
        """Pass a message that the line is too slow for, so that it does not hold up all others."""
        self._failed = self._failed + 1 if swarm.connected else 0
        if self._failed >= PASSED_AFTER:
            self._failed = 0
            log.warning("message_passed", seq=cursor + 1, reason=f"it did not arrive {PASSED_AFTER} times in {READ_S:.0f} s")
            await self._move_cursor(cursor + 1, revision)

    async def _move_cursor(self, position: int, revision: int) -> bool:
        """False if another replica has moved it."""
        try:
            bucket, moved = subjects.node_bucket(self._id), encode(IntakeCursor(position=position))
            await self._node.kv.update(bucket, subjects.INTAKE_KEY, moved, last_revision=revision)
        except Conflict:
            return False
        return True

    def _plan(self, cursor: int, first_seq: int, last_seq: int, allowed: int) -> IntakePlan:
        return plan_intake(
            cursor=cursor,
            first_seq=first_seq,
            last_seq=last_seq,
            allowed=allowed,
            rate_per_s=self._rate_per_s,
            random=self._random,
        )

    async def _read_claimed(self, swarm: Transport) -> list[StoredMessage]:
        """The next of the messages that the cursor has passed: at most 64 MiB at once, so that they
        do not gather here. A message that does not arrive is lost, like all that were claimed by a
        replica that ends.
        """
        claimed, self._claimed = self._claimed, []
        if self._claimed_as == "draw":
            self._claimed = claimed[DRAWN_AT_ONCE:]
            asked = [swarm.read(subjects.SWARM_ROLLOUTS, seq, 1, READ_S) for seq in claimed[:DRAWN_AT_ONCE]]
            return list({message.seq: message for messages in await _answered(asked) for message in messages or ()}.values())
        try:
            read = await swarm.read(subjects.SWARM_ROLLOUTS, claimed[0], len(claimed), READ_S)
        except NotConnected:
            self._claimed = claimed[1:] if swarm.connected else claimed
            raise
        found = [message for message in read if message.seq <= claimed[-1]]
        self._claimed = [seq for seq in claimed if found and seq > found[-1].seq]
        return found

    async def _newest_of_known(self, swarm: Transport) -> dict[int, StoredMessage]:
        known = self._random.sample(list(self._known_subjects), min(ASKED_SUBJECTS, len(self._known_subjects)))
        newest = await _answered([swarm.last(subjects.SWARM_ROLLOUTS, subject) for subject in known])
        return {
            message.seq: message
            for subject, message in zip(known, newest, strict=True)
            if message is not None and message.seq > self._known_subjects[subject]
        }


async def _answered(asked: Sequence[Awaitable[T]]) -> list[T | None]:
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
