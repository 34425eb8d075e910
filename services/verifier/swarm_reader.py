"""The verifier's connection to the swarm plane, and its reader of the swarm's stream."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import structlog
from msgspec import structs

from services.verifier.fair_queue import TokenBucket
from services.verifier.figures import Figures
from shared.config.verifier_config import VerifierConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import NOTHING_WANTED, ForeignDemand, IntakeCursor
from shared.contracts.streams import MissingStreams, prepare_swarm_streams
from shared.contracts.wire import MessageError
from shared.runtime import FatalError
from shared.runtime.logs import Log
from shared.runtime.planes import REFUSED_S, connect_swarm_plane
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
        self.note_sent: Callable[[int], None] = lambda seq: None
        """Told the position of each message that this process publishes."""

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
            FatalError: it refuses this node's key for `REFUSED_S`, or lacks streams that this node
                may not create.
        """
        if self._config.nats.swarm_url is None:
            return
        try:
            await self._connect(min(CONNECT_TIMEOUT_S, self._config.nats.connect_timeout_s), REFUSED_S)
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

    async def _connect(self, timeout_s: float, refused_s: float = 0.0) -> None:
        """Connect if nothing is connected yet, then prepare the streams. Raises TransportError."""
        nats = self._config.nats
        if self._transport is None:
            self._transport = await connect_swarm_plane(self._config, "verifier", timeout_s=timeout_s, refused_s=refused_s)
        await prepare_swarm_streams(
            self._transport, create=nats.create_streams, replicas=nats.replicas, window_bytes=nats.window_bytes
        )
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


# Decides which foreign messages to read. Pure; randomness is an argument.
#
# Reading follows use. The sampler says how many groups the next two batches lack
# (`shared.contracts.control.ForeignDemand`), and the verifiers read that many messages and a
# margin: all that came if that is no more, otherwise a random sample of the newest. What is left
# over stays eligible while it is among the newest, so that a burst of a slow neighbour is used over
# several batches. A node that wants nothing reads nothing, and a node's cost does not grow with the
# swarm.

MARGIN = 1.5
"""Messages read for each group wanted: some are refused, or without an advantage."""
KEPT = 1024
"""Newest messages that may still be read, so that a large J can use a burst."""
SPREAD = 4
LEAST_SPREAD = 32
"""A sample is drawn from the newest `SPREAD` times as many unread messages, at least
`LEAST_SPREAD`. From all of them it would be old where little is wanted; from no more than are
wanted a burst would decide it.
"""


@dataclass(frozen=True, slots=True)
class IntakePlan:
    """The positions to read now, in order, and those left unread that may be read later."""

    positions: tuple[int, ...]
    unread: tuple[int, ...]


def unread_positions(cursor: IntakeCursor, first_seq: int, last_seq: int) -> list[int]:
    """The newest positions that no verifier of the node has read, at most `KEPT`.

    first_seq, last_seq: the oldest and newest message after the cursor; both 0 if there is none.
    """
    new = range(max(cursor.position + 1, first_seq, last_seq - KEPT + 1), last_seq + 1)
    return [*cursor.unread, *new][-KEPT:]


def plan_intake(unread: Sequence[int], wanted: int, random: Random, at_hand: Collection[int] = ()) -> IntakePlan:
    """Choose `wanted` of the unread positions: those `at_hand` first, because their messages have
    arrived already, the others at random among the newest.
    """
    chosen = [seq for seq in unread if seq in at_hand][:wanted]
    others = [seq for seq in unread if seq not in at_hand][-max(SPREAD * wanted, LEAST_SPREAD) :]
    chosen += random.sample(others, min(len(others), wanted - len(chosen)))
    taken = set(chosen)
    return IntakePlan(tuple(sorted(chosen)), tuple(seq for seq in unread if seq not in taken))


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
"""Where less is wanted than came, up to this many senders in good standing are asked for a group of
theirs, for half of what is wanted: a sender that floods the stream does not take their places.
"""
OWN_POSITIONS = 4096
READER_S = 60.0
"""A verifier that has not read for this long has no part of what is wanted."""


class SwarmReader:
    """The reader of one replica."""

    def __init__(self, config: VerifierConfig, node: Transport, figures: Figures) -> None:
        self._id = config.node.id
        self._replica = config.node.replica
        self._node = node
        self._figures = figures
        rate_per_s = config.verifier.intake_groups_per_s * config.verifier.intake_look_factor
        self._looks = TokenBucket(rate_per_s, rate_per_s * BURST_S, time.monotonic())
        self._max_age_s = config.sampler.max_external_age_s
        self._known_subjects: OrderedDict[str, int] = OrderedDict()
        self._own: OrderedDict[int, None] = OrderedDict()
        self._random = Random()
        self._looked_at_s = -LOOKED_AT_AFTER_S
        self._claimed: list[int] = []
        self._too_old = 0
        """Messages up to this position are older than a group may be when it is trained on."""
        self._failed = 0

    async def wanted(self) -> ForeignDemand:
        """Read what the node's sampler wants; nothing as long as it has not said so.

        Raises:
            TransportError: the node plane did not answer.
        """
        entry = await self._node.kv.get(subjects.node_bucket(self._id), subjects.DEMAND_KEY)
        if entry is None:
            return NOTHING_WANTED
        try:
            return decode(entry.value, ForeignDemand)
        except MessageError as error:
            log.warning("demand_unreadable", reason=str(error), consequence="reading nothing", remedy="update the older side")
            return NOTHING_WANTED

    async def read(self, swarm: Transport, groups: int, pending: int) -> tuple[list[StoredMessage], bool]:
        """Messages for what is wanted, and whether there are more to read at once.

        Args:
            swarm: The swarm plane.
            groups: Groups that the node wants; its verifiers share them.
            pending: Messages of this replica that may still become some of them.

        Raises:
            TransportError: one of the two planes did not answer.
        """
        if self._claimed:
            return self._noted(await self._asked(self._read_claimed(swarm))), True
        most = min(self._looks.available(time.monotonic()), MAX_READ)
        if min(most, math.ceil(groups * MARGIN) - pending) <= 0:
            return [], False
        cursor, revision = await self._cursor()
        readers = self._readers(cursor)
        wanted = min(most, math.ceil(groups * MARGIN / len(readers)) - pending)
        if wanted <= 0:
            return [], False
        try:
            news = await self._asked(self._news(swarm, cursor))
        except NotConnected:
            await self._pass_if_stuck(swarm, cursor, revision)
            raise
        self._failed = 0
        first_seq, last_seq = news.first_seq, news.first_seq + news.messages - 1 if news.messages else 0
        if 0 < first_seq <= cursor.position:  # the stream was created anew
            cursor, self._too_old = IntakeCursor(position=0), 0
        unread = [seq for seq in unread_positions(cursor, first_seq, last_seq) if seq not in self._own and seq > self._too_old]
        arrived = {} if news.first is None or news.first.seq not in unread else {news.first.seq: news.first}
        if len(unread) > wanted:
            arrived |= await self._asked(self._by_known_senders(swarm, unread, min(ASKED_SUBJECTS, (wanted + 1) // 2)))
        plan = plan_intake(unread, wanted, self._random, arrived)
        moved = IntakeCursor(position=max(cursor.position, last_seq), unread=list(plan.unread), readers=readers)
        if (plan.positions or last_seq) and not await self._move_cursor(moved, revision):
            return [], True
        self._figures.border.read("ok")
        self._claimed = [seq for seq in plan.positions if seq not in arrived]
        more = bool(self._claimed) or (wanted == MAX_READ and bool(plan.unread))
        return self._noted([arrived[seq] for seq in plan.positions if seq in arrived]), more

    def sent(self, seq: int) -> None:
        """This node's own message is at this position, so it is not read."""
        self._own[seq] = None
        if len(self._own) > OWN_POSITIONS:
            self._own.popitem(last=False)

    def _noted(self, messages: list[StoredMessage]) -> list[StoredMessage]:
        self._looks.take(len(messages))
        self._figures.border.messages(len(messages))
        oldest_s = time.time() - self._max_age_s
        for message in messages:
            if message.subject in self._known_subjects:
                self._known_subjects[message.subject] = max(self._known_subjects[message.subject], message.seq)
            if message.stored_at < oldest_s:
                self._too_old = max(self._too_old, message.seq)
        return messages

    def accepted(self, message: StoredMessage) -> None:
        """Record that a group on this subject was accepted, so that it is worth asking for more."""
        self._known_subjects[message.subject] = max(self._known_subjects.pop(message.subject, 0), message.seq)
        if len(self._known_subjects) > KNOWN_SUBJECTS:
            self._known_subjects.popitem(last=False)

    def _readers(self, cursor: IntakeCursor) -> dict[str, float]:
        """The node's verifiers that read, this one included, and when each did last."""
        now_s = time.time()
        lately = {replica: at for replica, at in cursor.readers.items() if abs(now_s - at) < READER_S}
        return {**lately, self._replica: now_s}

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except NotConnected:
            self._figures.border.read("timeout")
            raise
        except TransportError:
            self._figures.border.read("error")
            raise

    async def _cursor(self) -> tuple[IntakeCursor, int]:
        entry = await self._node.kv.get(subjects.node_bucket(self._id), subjects.INTAKE_KEY)
        if entry is None:
            return IntakeCursor(position=0), 0
        try:
            return decode(entry.value, IntakeCursor), entry.revision
        except MessageError as error:
            log.warning("intake_cursor_unreadable", reason=str(error), consequence="reading the stream from its beginning")
            return IntakeCursor(position=0), entry.revision

    async def _news(self, swarm: Transport, cursor: IntakeCursor) -> Ends:
        """The messages after the cursor; all of a stream that was created anew and has fewer than
        the cursor says, which is looked at only now and then.
        """
        news = await swarm.ends(subjects.SWARM_ROLLOUTS, cursor.position + 1, READ_S, newest=False)
        now_s = time.monotonic()
        if news.first is not None or cursor.position == 0 or now_s - self._looked_at_s < LOOKED_AT_AFTER_S:
            return news
        self._looked_at_s = now_s
        newest = await swarm.last(subjects.SWARM_ROLLOUTS, ">")
        if newest is None or newest.seq >= cursor.position:
            return news
        return await swarm.ends(subjects.SWARM_ROLLOUTS, 1, READ_S, newest=False)

    async def _pass_if_stuck(self, swarm: Transport, cursor: IntakeCursor, revision: int) -> None:
        """Pass a message that the line is too slow for, so that it does not hold up all others."""
        self._failed = self._failed + 1 if swarm.connected else 0
        if self._failed >= PASSED_AFTER:
            self._failed, passed = 0, cursor.position + 1
            log.warning("message_passed", seq=passed, reason=f"it did not arrive {PASSED_AFTER} times in {READ_S:.0f} s")
            await self._move_cursor(structs.replace(cursor, position=passed), revision)

    async def _move_cursor(self, cursor: IntakeCursor, revision: int) -> bool:
        """False if another replica has moved it."""
        try:
            bucket = subjects.node_bucket(self._id)
            await self._node.kv.update(bucket, subjects.INTAKE_KEY, encode(cursor), last_revision=revision)
        except Conflict:
            return False
        return True

    async def _read_claimed(self, swarm: Transport) -> list[StoredMessage]:
        """The next of the messages that the cursor has passed: at most 64 MiB at once, so that they
        do not gather here. A message that does not arrive is lost, like all that were claimed by a
        replica that ends.
        """
        claimed, self._claimed = self._claimed, []
        neighbours = next((count for count, seq in enumerate(claimed) if seq != claimed[0] + count), len(claimed))
        if neighbours == 1:
            alone = [seq for seq in claimed if seq - 1 not in claimed and seq + 1 not in claimed][:DRAWN_AT_ONCE]
            self._claimed = [seq for seq in claimed if seq not in alone]
            asked = [swarm.get(subjects.SWARM_ROLLOUTS, seq) for seq in alone]
            return [message for message in await _answered(asked) if message is not None]
        try:
            read = await swarm.read(subjects.SWARM_ROLLOUTS, claimed[0], neighbours, READ_S)
        except NotConnected:
            self._claimed = claimed[1:] if swarm.connected else claimed
            raise
        found = [message for message in read if message.seq < claimed[0] + neighbours]
        self._claimed = [seq for seq in claimed if found and seq > found[-1].seq] if found else claimed[neighbours:]
        return found

    async def _by_known_senders(self, swarm: Transport, unread: Sequence[int], most: int) -> dict[int, StoredMessage]:
        """The oldest unread message of each of some senders whose groups were accepted: behind a
        flood it is not among the newest.
        """
        known = self._random.sample(list(self._known_subjects), min(most, len(self._known_subjects)))
        starts = [max(unread[0], self._known_subjects[subject] + 1) for subject in known]
        pairs = zip(known, starts, strict=True)
        found = await _answered([swarm.next(subjects.SWARM_ROLLOUTS, subject, start) for subject, start in pairs])
        return {message.seq: message for message in found if message is not None and message.seq in set(unread)}


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
