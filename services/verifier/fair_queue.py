"""Chooses which waiting message is examined next, so that no sender crowds out the others. Pure;
time is an argument.

Each sender has a queue and a token bucket. Queues are served in turn, in proportion to what each
sender has earned (`services.verifier.reputation`), and unused turns go to the others (max-min
fairness); the bucket limits a sender even when nobody else is there. A message takes as many turns
and tokens as its size requires (`turns_of`). Senders that have not earned a whole share yet are
newcomers: all of them together are guaranteed `newcomer_share` of the turns while established
senders wait too, so that a thousand new names neither crowd anybody out nor are locked out
themselves. When too much waits, the class that uses most room relative to its share loses a
message: the oldest of its sender with most room.

The sender is the one that the subject names, before any check. The cost of a forgery is refunded
(`refund`), so that forging costs its victim nothing. Names that belong to a key wait in that key's
queue. A name that belongs to no key yet has its own queue, and its messages are charged to the key
that signed them once that is known (`charge`), so that more names do not give a larger share. Once
the name belongs to a key, what waits under it goes on waiting in the key's queue (`move`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.verifier.border import Refusal, Refused
from shared.contracts import subjects
from shared.transport.base import BadReference, StoredMessage
from shared.transport.blobs import reference_of


class TokenBucket:
    """At most `rate_per_s` on average, and `burst` at once."""

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, burst)
        self._tokens = self._burst
        self._updated_s = now_s

    def available(self, now_s: float) -> int:
        """Whole tokens that can be taken now. A clock that jumps back adds nothing."""
        elapsed_s = max(0.0, now_s - self._updated_s)
        self._updated_s = max(self._updated_s, now_s)
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._rate_per_s)
        return int(self._tokens)

    def take(self, count: int) -> None:
        """Use tokens. Taking more than are available causes a debt, which must be paid back before
        tokens are available again.
        """
        self._tokens -= count

    def give_back(self, count: int) -> None:
        self._tokens = min(self._burst, self._tokens + count)


MAX_WAITING = 512
STEADY_S = 10.0
"""A sender that is within its rate over this time does not exceed it: groups come in bursts."""
MAX_WAITING_BYTES = 64 * 2**20
MAX_SENDERS = 1024
NEWCOMER_SHARE = 0.25
BYTES_PER_TURN = 64 * 1024
"""One turn covers sixteen answers of a thousand tokens, with ids. Accepted groups are stored in the
same stream as local ones, so this limits how fast others can fill it: its gigabyte takes at least
about fourteen minutes with all of the default's 20 turns per second.
"""

T = TypeVar("T")


def turns_of(size_bytes: int) -> int:
    """Number of turns that a message of this size takes."""
    return 1 + size_bytes // BYTES_PER_TURN


def anything_fits(sender: str, size_bytes: int) -> bool:
    """A test for `next` without any limit other than the turns."""
    return True


@dataclass(slots=True)
class _Sender(Generic[T]):
    bucket: TokenBucket
    sent: TokenBucket
    """What it may send, by the time at which it did. The bucket of turns also runs dry when this
    node is short of time, or when many newcomers share their part.
    """
    earned: float
    turn: float
    """Self-clocked fair queueing (Golestani, INFOCOM 1994): the time, in turns, at which its next
    message is finished; the smallest goes first.
    """
    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    size_bytes: int = 0
    exceeds: bool = False

    @property
    def established(self) -> bool:
        return self.earned >= 1.0

    @property
    def room(self) -> float:
        """The part of both limits together that it uses, relative to its share."""
        return _room(len(self.waiting), self.size_bytes) / self.earned

    @property
    def claim_to_give_way(self) -> tuple[bool, float]:
        """Return how early it loses a message. An established sender with one waiting message,
        however large, loses it after all senders that have more, so that several keys cannot push
        it out. This does not apply to newcomers, because new names could have one message each
        without end.
        """
        return not self.established or len(self.waiting) > 1, self.room


@dataclass(slots=True)
class _Class:
    share: float
    turn: float = 0.0
    line_turn: float = 0.0
    """Turn of the message served last. A queue that was empty starts 1 / share after it, so that
    new names, which have small shares, never come before a sender that has earned more.
    """
    waiting: int = 0
    size_bytes: int = 0

    @property
    def room(self) -> float:
        return _room(self.waiting, self.size_bytes) / self.share


class FairQueue(Generic[T]):
    """Messages by sender: `rate_per_s` for all together, `max_share` of it for each, and at most
    `burst_s` seconds' worth of either at once.
    """

    def __init__(
        self, rate_per_s: float, max_share: float, burst_s: float, now_s: float, newcomer_share: float = NEWCOMER_SHARE
    ) -> None:
        """`newcomer_share`: part of the turns, in (0, 1), for all senders together that have not
        earned a whole share.
        """
        self._rate_per_s = rate_per_s * max_share
        self._burst_s = burst_s
        self._budget = TokenBucket(rate_per_s, rate_per_s * burst_s, now_s)
        self._senders: OrderedDict[str, _Sender[T]] = OrderedDict()
        self._classes = {True: _Class(1.0 - newcomer_share), False: _Class(newcomer_share)}

    def __len__(self) -> int:
        return sum(each.waiting for each in self._classes.values())

    def offer(
        self, sender: str, message: T, size_bytes: int, now_s: float, earned: float = 1.0, *, sent_at: float | None = None
    ) -> list[tuple[str, T]]:
        """Queue a message. Returns the messages dropped to make room, with their senders.

        `size_bytes` is its claimed size: a reference takes the room of the payload that this node
        would fetch. `earned`: the sender's current share in (0, 1]; below 1 it is a newcomer.
        `sent_at`: when the server stored it (Unix time), if that is not now.
        """
        line = self._line(sender, now_s, earned)
        turns, at = turns_of(size_bytes), now_s if sent_at is None else sent_at
        line.exceeds = line.sent.available(at) < min(turns, self._rate_per_s * STEADY_S)
        if not line.exceeds:
            line.sent.take(turns)
        self._take_turn(line)
        line.waiting.append((message, size_bytes))
        self._count(line, 1, size_bytes)
        dropped: list[tuple[str, T]] = []
        while len(self) > MAX_WAITING or (self._waiting_bytes() > MAX_WAITING_BYTES and len(self) > 1):
            name = self._takes_most()
            lost, lost_bytes = self._senders[name].waiting.popleft()
            self._count(self._senders[name], -1, -lost_bytes)
            dropped.append((name, lost))
        return dropped

    def in_turn(self, most: int) -> int:
        """Return how many messages wait, counting at most `most` of a sender, whose flood waits
        longer than a need for foreign groups.
        """
        return sum(min(len(line.waiting), most) for line in self._senders.values())

    def exceeds(self, sender: str) -> bool:
        """Return whether the sender sends more than one sender may (`rate_per_s` x `max_share`)."""
        line = self._senders.get(sender)
        return line is not None and line.exceeds

    def next(self, now_s: float, fits: Callable[[str, int], bool] = anything_fits) -> tuple[str, T] | None:
        """The next message and its sender, or None if no sender may proceed now. A sender whose
        next message does not fit is skipped this time.

        `fits` is called in the order in which senders would be served.
        """
        if not len(self) or self._budget.available(now_s) < 1:
            return None
        first: dict[bool, str] = {}
        for name in self._ready(now_s):
            line = self._senders[name]
            if line.established not in first and fits(name, line.waiting[0][1]):
                first[line.established] = name
        if not first:
            return None
        established = min(first, key=lambda each: self._classes[each].turn)
        name, place = first[established], self._classes[established]
        if not first.get(not established):
            # A sender that may not proceed now accumulates no credit for later.
            other = self._classes[not established]
            other.turn = max(other.turn, place.turn)
        line = self._senders[name]
        message, size_bytes = line.waiting.popleft()
        turns = turns_of(size_bytes)
        place.line_turn = line.turn
        place.turn += turns / place.share
        line.turn += turns / line.earned
        self._senders.move_to_end(name)
        self._budget.take(turns)
        line.bucket.take(turns)
        self._count(line, -1, -size_bytes)
        return name, message

    def move(self, name: str, key: str, now_s: float, earned: float = 1.0) -> None:
        """Move what waits under a name to the queue of the key that has the name now, before what
        arrived there since. What the name was charged is forgotten: charge it to the key.
        """
        left = self._senders.pop(name, None)
        if left is None or not left.waiting:
            return
        messages, size_bytes = len(left.waiting), left.size_bytes
        self._count(left, -messages, -size_bytes)
        line = self._line(key, now_s, earned)
        self._take_turn(line)
        line.waiting.extendleft(reversed(left.waiting))
        self._count(line, messages, size_bytes)

    def charge(self, key: str, now_s: float, earned: float = 1.0, size_bytes: int = 0, *, on_credit: bool = False) -> bool:
        """Charge this key's queue with the tokens of a message that came under a name that no key
        owned. False if it has none left, unless it may pay later (`on_credit`).
        """
        bucket = self._line(key, now_s, earned).bucket
        self._senders.move_to_end(key)
        if bucket.available(now_s) < 1 and not on_credit:
            return False
        bucket.take(turns_of(size_bytes))
        return True

    def refund(self, sender: str, *, blameless: bool, size_bytes: int = 0) -> None:
        """Refund the budget for a message that was refused cheaply.

        `blameless`: also refund the named sender, who may not have sent it.
        """
        turns = turns_of(size_bytes)
        self._budget.give_back(turns)
        line = self._senders.get(sender)
        if line is None:
            return
        if line.established:
            # Newcomers keep to their part of the turns even with messages that cost almost nothing;
            # otherwise replayed messages would come before all others.
            place = self._classes[True]
            place.turn -= turns / place.share
        if blameless:
            line.bucket.give_back(turns)
            line.turn -= turns / line.earned

    def may_go_on(self, now_s: float, fits: Callable[[str, int], bool] = anything_fits) -> bool:
        if not len(self) or self._budget.available(now_s) < 1:
            return False
        return any(fits(name, self._senders[name].waiting[0][1]) for name in self._ready(now_s))

    def _ready(self, now_s: float) -> list[str]:
        """Senders whose own allowance covers their next message, in the order in which they would
        be served.
        """
        ready = [name for name, line in self._senders.items() if line.waiting and line.bucket.available(now_s) >= 1]
        return sorted(ready, key=lambda name: (self._classes[self._senders[name].established].turn, self._senders[name].turn))

    def _line(self, sender: str, now_s: float, earned: float) -> _Sender[T]:
        line = self._senders.get(sender)
        if line is None:
            self._forget_idle()
            bucket = TokenBucket(self._rate_per_s, self._rate_per_s * self._burst_s, now_s)
            sent = TokenBucket(self._rate_per_s, self._rate_per_s * STEADY_S, 0.0)
            # Last in turn, so that a new name does not jump the queue.
            line = self._senders[sender] = _Sender(bucket, sent, earned, 0.0)
        elif line.earned != earned:
            self._promote(line, earned)
        return line

    def _take_turn(self, line: _Sender[T]) -> None:
        """Give a queue its place in turn if it was empty, and so its class if that was."""
        place = self._classes[line.established]
        if not place.waiting:
            place.turn = max(place.turn, self._classes[not line.established].turn)
        if not line.waiting:
            line.turn = max(line.turn, place.line_turn + 1.0 / line.earned)

    def _promote(self, line: _Sender[T], earned: float) -> None:
        """Move a sender's waiting messages, and its turn, to its current class."""
        before = line.established
        waiting, size_bytes = len(line.waiting), line.size_bytes
        self._count(line, -waiting, -size_bytes)
        line.earned = earned
        self._count(line, waiting, size_bytes)
        if line.established != before:
            line.turn = self._classes[line.established].line_turn + 1.0 / earned

    def _takes_most(self) -> str:
        established = max(self._classes, key=lambda each: (self._classes[each].waiting > 0, self._classes[each].room))
        return max(
            (name for name, line in self._senders.items() if line.waiting and line.established is established),
            key=lambda name: self._senders[name].claim_to_give_way,
        )

    def _forget_idle(self) -> None:
        while len(self._senders) >= MAX_SENDERS:
            idle = [name for name, line in self._senders.items() if not line.waiting]
            if not idle:
                return
            del self._senders[next((name for name in idle if not self._senders[name].established), idle[0])]

    def _count(self, line: _Sender[T], messages: int, size_bytes: int) -> None:
        place = self._classes[line.established]
        line.size_bytes += size_bytes
        place.waiting += messages
        place.size_bytes += size_bytes

    def _waiting_bytes(self) -> int:
        return sum(each.size_bytes for each in self._classes.values())


def _room(messages: int, size_bytes: int) -> float:
    return size_bytes / MAX_WAITING_BYTES + messages / MAX_WAITING


# Estimates how much each sender sends from the few messages that this node reads. Pure.

RATES_S = 300.0
RATES_MESSAGES = 512
FEWEST_READ = 5
"""A sender of whom fewer messages were read may have been met by chance."""


class SendingRates:
    """Estimates what new senders put into the stream, read or not. A node reads a random sample of
    the newest messages, so a sender has about the same part of the stream as of what was read.
    """

    def __init__(self, most_per_s: float) -> None:
        """`most_per_s`: messages per second that one sender may send, over `STEADY_S`."""
        self._most_per_s = most_per_s
        self._read: deque[tuple[int, float, str, bool]] = deque(maxlen=RATES_MESSAGES)

    def add(self, account: str, seq: int, stored_at: float, *, newcomer: bool) -> None:
        """Add a message that was read: its position, and when the server stored it (Unix time)."""
        self._read.append((seq, stored_at, account, newcomer))

    def flood_per_s(self, now_s: float) -> float:
        """Messages per second of the newcomers that each exceed what one sender may send, or 0.0.

        `now_s`: Unix time.
        """
        lately = sorted(each for each in self._read if each[1] > now_s - RATES_S)
        found: dict[str, list[int]] = {}
        for place, (_, _, account, newcomer) in enumerate(lately):
            if newcomer:
                found.setdefault(account, []).append(place)
        total_per_s = 0.0
        for places in found.values():
            if len(places) < FEWEST_READ:
                continue
            since = places[0]
            first_seq, first_at, _, _ = lately[since]
            part = len(places) / (len(lately) - since)
            per_s = part * (lately[-1][0] - first_seq + 1) / max(now_s - first_at, STEADY_S)
            total_per_s += per_s if per_s > self._most_per_s else 0.0
        return total_per_s


# Limits on the cost of large foreign payloads: bytes in progress at once, and chunks read once.
# Pure: no clock, no I/O.
#
# A message of a few hundred bytes can claim a payload of megabytes. Two rules prevent
# amplification: payloads in progress are limited for the node and for each sender, and a chunk
# belongs to the message that referred to it first, so that bytes stored once are read once and
# not for each of a thousand references.

NODE_BYTES = 64 * 2**20
"""Most bytes of large payloads in progress at once: being fetched, decoded or scored."""
SENDER_BYTES = 16 * 2**20
"""Most bytes of one sender's large payloads, so that at least four senders are needed to make
others' large groups wait.
"""
SMALL_BYTES = 64 * 1024
"""Smaller payloads do not count. With 64 messages in progress they are at most 4 MiB, and they must
not wait behind large ones.
"""
MAX_CHUNKS = 65_536
"""Number of chunks remembered: 2 GiB, the swarm's window by default, in chunks of 32 KiB."""


def beyond_budget(earned: float, *, exceeds: bool, backlog: bool = False) -> Refusal:
    """The reason for refusing a message for which this node has no turn. It is a flood only if its
    sender, whose earned share is in [0, 1], is new and sends more than one sender may. A fast node
    in good standing is no attacker; nor are many new nodes together, and a node that is short of
    time meets its own limit and not theirs.

    backlog: the message was in the stream before this node started to read. A node that joins knows
    nobody yet, and what others made while it was away is not a flood.
    """
    return Refusal.FLOOD if exceeds and earned < 1.0 and not backlog else Refusal.SURPLUS


class ClaimedChunks:
    """Which message each chunk belongs to, by sender, so that one sender's references take nothing
    from another's.
    """

    def __init__(self, capacity: int = MAX_CHUNKS) -> None:
        self._capacity = capacity
        self._owner: OrderedDict[tuple[str, int], int] = OrderedDict()

    def claim(self, sender: str, seq: int, chunks: Sequence[int]) -> int | None:
        """Record that the message at `seq` refers to these chunks. Returns another of the sender's
        messages if that one referred to one of them first.
        """
        for chunk in chunks:
            owner = self._owner.get((sender, chunk), seq)
            if owner != seq:
                return owner
        for chunk in chunks:
            self._owner[sender, chunk] = seq
            self._owner.move_to_end((sender, chunk))
        while len(self._owner) > self._capacity:
            self._owner.popitem(last=False)
        return None

    def refuse(self, message: StoredMessage) -> Refused | None:
        """Refuse, before anything is fetched, an invalid reference and one to chunks that another
        message referred to.
        """
        author = subjects.rollouts_author(message.subject)
        try:
            reference = reference_of(message)
        except BadReference as error:
            return Refused(Refusal.REFERENCE, author, str(error))
        first = None if reference is None else self.claim(author or "", message.seq, reference.chunks)
        if first is None:
            return None
        return Refused(
            Refusal.REFERENCE, author, f"its chunks belong to message {first}: each payload is stored in chunks of its own"
        )


# Limits how many foreign groups are in progress at once, from whom, and with how many bytes.
# Pure: no clock, no I/O.
#
# A group holds a place while it is fetched, examined or stored. While it waits for the scorers it
# holds none; otherwise senders of slow groups would block everybody else's.
# `shared.tasks.sandbox.foreign` limits how many wait there and divides the time.

IN_WORK = 64
IN_WORK_PER_SENDER = 4
"""Enough to hide the time that payloads take to arrive. Groups that wait for the scorers also count
here.
"""


class InFlightLimit:
    """The groups in progress, by sender, and the bytes of the large ones."""

    def __init__(self, node_bytes: int = NODE_BYTES, sender_bytes: int = SENDER_BYTES) -> None:
        self._node_bytes, self._sender_bytes = node_bytes, sender_bytes
        self._groups: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._held = 0
        self.total_bytes = 0

    @property
    def free(self) -> bool:
        return self._held < IN_WORK

    def fits(self) -> Callable[[str, int], bool]:
        """A function that tests whether a sender's payload of some size may be started, for one
        pass along the queue in its order.

        A payload that does not fit also keeps later large ones out; otherwise smaller claims could
        overtake it for ever. A payload larger than a limit may start when nothing else is in
        progress.
        """
        somebody_waits = False

        def fits(sender: str, size_bytes: int) -> bool:
            nonlocal somebody_waits
            if self._groups[sender] >= IN_WORK_PER_SENDER:
                return False
            if size_bytes <= SMALL_BYTES:
                return True
            held = self._bytes[sender]
            if somebody_waits or (held and held + size_bytes > self._sender_bytes):
                return False
            somebody_waits = self.total_bytes > 0 and self.total_bytes + size_bytes > self._node_bytes
            return not somebody_waits

        return fits

    def take(self, sender: str, size_bytes: int) -> None:
        self._groups[sender] += 1
        self._hold(sender, size_bytes, 1)

    def leave(self, sender: str, size_bytes: int) -> None:
        self._hold(sender, size_bytes, -1)
        self._groups[sender] -= 1
        for counts in (self._groups, self._bytes):
            if not counts[sender]:
                del counts[sender]

    @contextmanager
    def lent(self, sender: str, size_bytes: int) -> Iterator[None]:
        """Give up the place and its bytes inside the block, while the group waits for the
        scorers.
        """
        self._hold(sender, size_bytes, -1)
        try:
            yield
        finally:
            self._hold(sender, size_bytes, 1)

    def _hold(self, sender: str, size_bytes: int, groups: int) -> None:
        self._held += groups
        if size_bytes > SMALL_BYTES:
            self._bytes[sender] += groups * size_bytes
            self.total_bytes += groups * size_bytes
