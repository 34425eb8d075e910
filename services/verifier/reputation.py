"""Knowledge of each key: a moving average of its offences with quarantine and a way back, the share
of the intake that it has earned, what its groups cost, and how replicas share that.

Keys, not names, have a reputation: a name in a message is only a claim
(`services.verifier.border`). All is pure and takes time as an argument. Changes are also kept as
events, so that replicas can apply theirs to a common state (`services.verifier.sender_watch`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Generic, TypeVar

from services.verifier.checks import Offence
from services.verifier.trust import Trust
from shared.contracts.senders import MAX_REPUTATIONS, AbsurdText, KeyReputation, SenderStanding

STEP = 0.1
"""Weight of the newest group in the moving average: seven offences in a row, or half of many
groups, are too much.
"""

LIMIT = 0.5
"""Suspicion above this causes quarantine."""

PAROLE = LIMIT / 2
"""Suspicion after a quarantine: four more offences cause the next one, which is longer."""

HALF_LIFE_S = 600.0
"""Suspicion halves in this time even if no group arrives."""

FIRST_S = 60.0
LONGEST_S = 3600.0
"""Of a quarantine. Each one doubles the next, which has the first length again after a quiet hour.
"""

MAX_KEYS = 10_000
MAX_EVENTS = 10_000
"""Most events kept while the node plane is unreachable; older ones then count at this replica
only.
"""


class LaterOffence(Offence):
    """Offences that are found after a group was accepted. Text that is absurd under this node's
    policy may be something it has yet to learn: it counts by the fraction of absurd answers.
    """

    ABSURD = "absurd", 0.5


@dataclass(frozen=True, slots=True)
class Event:
    """A judged group: accepted (`offence` None), or an offence, weighted by the part of the group
    that it concerns.
    """

    public_key: str
    name: str
    offence: Offence | None
    part: float
    at_s: float


@dataclass(slots=True)
class _Record:
    name: str
    suspicion: float = 0.0
    updated_s: float = 0.0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    quarantined_until_s: float = 0.0
    quarantine_s: float = 0.0
    """End (Unix time) and length of the last quarantine; zeros if there was none."""

    def quarantine(self, now_s: float) -> float:
        """Quarantine the key from now on. Returns for how many seconds."""
        repeated = self.quarantine_s and self.quarantined_until_s > now_s - LONGEST_S
        self.quarantine_s = min(LONGEST_S, 2 * self.quarantine_s) if repeated else FIRST_S
        self.quarantined_until_s = now_s + self.quarantine_s
        return self.quarantine_s

    def remaining_s(self, now_s: float) -> float:
        """Remaining seconds of the quarantine. A clock that is set back does not prolong it beyond
        its length.
        """
        return min(self.quarantine_s, max(0.0, self.quarantined_until_s - now_s))

    def decayed(self, now_s: float) -> float:
        return float(self.suspicion * 0.5 ** (max(0.0, now_s - self.updated_s) / HALF_LIFE_S))


class Reputation:
    """Suspicion per key: the exponentially weighted average over its judged groups, 0 for an
    accepted one and `Offence.blame` for the others.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def blame(self, public_key: str, name: str, reason: Offence, now_s: float, part: float = 1.0) -> float:
        """Record an offence. Returns the seconds for which it quarantines the key, 0 for none.

        `part`, in [0, 1]: of the group. An offence may be sufficient by itself.
        """
        event = Event(public_key, name, reason, part, now_s)
        self._events.append(event)
        return self.apply(event)

    def credit(self, public_key: str, name: str, now_s: float) -> None:
        event = Event(public_key, name, None, 1.0, now_s)
        self._events.append(event)
        self.apply(event)

    def apply(self, event: Event) -> float:
        """Apply an event as `blame` and `credit` do, without recording it as this replica's."""
        offence = event.offence
        if offence is None:
            self._move(event.public_key, event.name, 0.0, event.at_s).accepted += 1
            return 0.0
        record = self._move(event.public_key, event.name, offence.blame * event.part, event.at_s)
        record.refused[offence.value] += 1
        if not offence.sufficient and record.suspicion <= LIMIT:
            return 0.0
        record.suspicion = min(record.suspicion, PAROLE)
        return record.quarantine(event.at_s)

    def remaining_s(self, public_key: str, now_s: float) -> float:
        """Remaining seconds of the key's quarantine; 0 if there is none."""
        record = self._records.get(public_key)
        return record.remaining_s(now_s) if record else 0.0

    def accepted(self, public_key: str) -> int:
        record = self._records.get(public_key)
        return record.accepted if record else 0

    def suspicion(self, public_key: str, now_s: float) -> float:
        record = self._records.get(public_key)
        return record.decayed(now_s) if record else 0.0

    def quarantined(self, now_s: float) -> int:
        return sum(record.quarantined_until_s > now_s for record in self._records.values())

    def take_events(self) -> list[Event]:
        """The events since the last call, for the common state."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def keep_events(self, events: Iterable[Event]) -> None:
        """Put back events that the common state could not take, before those that came since."""
        self._events = deque([*events, *self._events], maxlen=MAX_EVENTS)

    def adopt(self, keys: Iterable[KeyReputation], events: Iterable[Event]) -> None:
        """Replace the local records by the common state's, and apply the events that it does not
        contain yet.
        """
        adopted = set()
        for each in keys:
            adopted.add(each.public_key)
            self._records.pop(each.public_key, None)
            terms = each.quarantined_until, min(each.quarantine_s, LONGEST_S)
            self._records[each.public_key] = _Record(
                each.name, each.suspicion, each.updated_at, each.accepted, Counter(each.refused), *terms
            )
        self._forget_oldest()
        for event in events:
            if event.public_key in adopted:  # otherwise this replica's own record contains it
                self.apply(event)

    def records(self, now_s: float) -> list[KeyReputation]:
        """Select what the common state keeps: the worst keys, and those with most accepted groups,
        at most `MAX_REPUTATIONS`.
        """
        offenders = [key for key, record in self._records.items() if record.refused]
        most = MAX_REPUTATIONS // 2
        worst = nlargest(most, offenders, key=lambda key: (self.remaining_s(key, now_s), self.suspicion(key, now_s)))
        best = nlargest(most, self._records, key=lambda key: self._records[key].accepted)
        kept = dict.fromkeys((*worst, *best))
        return [self._kept(key) for key in sorted(kept)]

    def worst(self, count: int, now_s: float) -> list[SenderStanding]:
        """At most `count` keys with offences: those in quarantine first, then by suspicion."""
        offenders = [self._standing(key, record, now_s) for key, record in self._records.items() if record.refused]
        return sorted(offenders, key=lambda each: (-each.quarantined_s, -each.suspicion, each.name))[:count]

    def _standing(self, key: str, record: _Record, now_s: float) -> SenderStanding:
        return SenderStanding(
            public_key=key,
            name=record.name,
            suspicion=round(record.decayed(now_s), 3),
            accepted=record.accepted,
            refused=dict(sorted(record.refused.items())),
            quarantined_s=round(record.remaining_s(now_s), 1),
        )

    def _move(self, public_key: str, name: str, weight: float, now_s: float) -> _Record:
        record = self._records.pop(public_key, None) or _Record(name, 0.0, now_s)
        self._records[public_key] = record
        self._forget_oldest()
        before = record.decayed(now_s)
        record.name, record.updated_s = name or record.name, max(record.updated_s, now_s)
        record.suspicion = before + STEP * (weight - before)
        return record

    def _forget_oldest(self) -> None:
        while len(self._records) > MAX_KEYS:
            del self._records[next(iter(self._records))]

    def _kept(self, public_key: str) -> KeyReputation:
        record = self._records[public_key]
        return KeyReputation(
            public_key=public_key,
            name=record.name,
            suspicion=round(record.suspicion, 6),
            updated_at=record.updated_s,
            accepted=record.accepted,
            refused=dict(record.refused),
            quarantined_until=record.quarantined_until_s,
            quarantine_s=record.quarantine_s,
        )


ESTABLISHED = 1.0
"""The whole share, of a sender with enough accepted groups and little suspicion."""

LEAST = 1 / 64
"""No sender's share falls below this, so that every sender is served eventually."""

TOLERATED = LIMIT / 4
"""Suspicion up to this has no effect, so that an honest sender's single offence (0.1 at most) is
forgiven.
"""


def intake_share(accepted: int, suspicion: float, needed: int) -> float:
    """A sender's share in (0, 1]: `ESTABLISHED` with at least `needed` accepted groups (0: at once)
    and suspicion up to `TOLERATED`.

    It grows in proportion to the accepted groups and falls linearly with the suspicion, to its
    minimum where quarantine begins. Shares matter only when there is not enough for all: in a young
    swarm, in which every node is new, all work at full speed.
    """
    grown = min(ESTABLISHED, (1 + accepted) / (1 + needed))
    lost = max(0.0, suspicion - TOLERATED) / (LIMIT - TOLERATED)
    return max(LEAST, grown * (1.0 - min(1.0, lost)))


COPIERS = "~copiers"
"""The account of all keys caught copying; it is neither a node's name nor a key."""

CAUGHT = 3
"""Copies that chance cannot explain, within `CAUGHT_S`, before a key counts as a copier. A single
one may come from a node that was restored.
"""

CAUGHT_S = 3600.0
MAX_CAUGHT = 10_000


@dataclass(frozen=True, slots=True)
class Sender:
    """`account`: messages with equal values count against the same share of the intake and of a
    batch. `earned`: the part of a whole share that it has earned.
    """

    account: str
    earned: float
    known: bool
    """Whether the key is known; otherwise `account` is only a name that the subject claims."""

    @property
    def established(self) -> bool:
        return self.earned >= 1.0


@dataclass(slots=True)
class _Caught:
    times: int
    last_s: float


class Senders:
    """Whose share of the intake and of a batch a group uses, and how large it is: by key if it is
    known.

    All keys that were repeatedly caught copying foreign groups share one sender's quota, so a
    cluster that sends the same material under many keys gains nothing by their number. A key leaves
    that set an hour after it was last caught.
    """

    def __init__(self, trust: Trust, reputation: Reputation, needed: int) -> None:
        """`needed`: accepted groups until a sender has a whole share."""
        self._trust = trust
        self._reputation = reputation
        self._needed = needed
        self._caught: OrderedDict[str, _Caught] = OrderedDict()

    def by_name(self, name: str, now_s: float) -> Sender:
        """The sender of a message under this name, before its signature is checked. A name that
        belongs to no key has its own queue.
        """
        key = self._trust.key_of(name)
        return self.by_key(key, now_s) if key is not None else Sender(name, intake_share(0, 0.0, self._needed), known=False)

    def by_key(self, public_key: str, now_s: float) -> Sender:
        if self.is_copier(public_key, now_s):
            return Sender(COPIERS, LEAST, known=True)
        accepted, suspicion = self._reputation.accepted(public_key), self._reputation.suspicion(public_key, now_s)
        return Sender(public_key, intake_share(accepted, suspicion, self._needed), known=True)

    def copied(self, public_key: str, now_s: float) -> None:
        """Record that this key sent a copy of another's group that chance cannot explain."""
        caught = self._caught.pop(public_key, None)
        if caught is None or now_s - caught.last_s > CAUGHT_S:
            caught = _Caught(0, now_s)
        caught.times += 1
        caught.last_s = max(caught.last_s, now_s)
        self._caught[public_key] = caught
        if len(self._caught) > MAX_CAUGHT:
            self._caught.popitem(last=False)

    def is_copier(self, public_key: str, now_s: float) -> bool:
        caught = self._caught.get(public_key)
        return caught is not None and caught.times >= CAUGHT and now_s - caught.last_s <= CAUGHT_S


GRACE_S = 15.0
PER_GROUP_S = 0.5
"""Groups of eight answers to reasoning-gym's datasets cost 0.01 s at the median and 0.23 s at most,
including the fork.
"""
COST_HALF_LIFE_S = 600.0
MAX_ACCOUNTS = 10_000


@dataclass(slots=True)
class _Account:
    spent_s: float = 0.0
    groups: float = 0.0
    updated_s: float = 0.0


class ScoringCost:
    """Cost of each key's groups in the scorers; the account that was unused for longest is
    forgotten first.

    Every hang costs something, but a single slow answer is no offence: a key may use `GRACE_S`
    seconds of CPU time, and `PER_GROUP_S` more for each of its accepted groups. Both decay with the
    half-life `COST_HALF_LIFE_S`. CPU time, not wall-clock time, counts, so that a busy machine
    blames nobody.
    """

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def charge(self, public_key: str, cpu_s: float, *, accepted: bool, now_s: float) -> bool:
        """Record a group and its cost. True if the key has now cost too much; it then starts again
        with half of the grace.
        """
        account = self._accounts.setdefault(public_key, _Account(updated_s=now_s))
        self._accounts.move_to_end(public_key)
        if len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        kept = 0.5 ** (max(0.0, now_s - account.updated_s) / COST_HALF_LIFE_S)
        account.spent_s = account.spent_s * kept + cpu_s
        account.groups = account.groups * kept + accepted
        account.updated_s = max(account.updated_s, now_s)
        if account.spent_s <= GRACE_S + PER_GROUP_S * account.groups:
            return False
        self._accounts[public_key] = _Account(spent_s=GRACE_S / 2, updated_s=now_s)
        return True


TRIES = 3
"""Groups of a key and dataset, one after the other, that are derived before its others are refused
underived.
"""
AGAIN_S = 600.0
"""One more group is derived after this time, because its sender may have been updated."""
MAX_DATASETS = 10_000


R = TypeVar("R")


@dataclass(slots=True)
class _Difference(Generic[R]):
    problem: tuple[R, str]
    times: int
    until_s: float


class TaskDifferences(Generic[R]):
    """Remembers the datasets whose tasks come out otherwise here than a key's node said, or cannot
    be derived or judged here. Deriving one takes a process and up to a second of CPU time, so a key
    cannot have that done for each of its messages.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Difference[R]] = OrderedDict()

    def refused(self, public_key: str, dataset: str, problem: tuple[R, str], now_s: float) -> None:
        """Record a group of this key whose task differs here."""
        earlier = self._known.pop((public_key, dataset), None)
        times = earlier.times + 1 if earlier else 1
        self._known[public_key, dataset] = _Difference(problem, times, now_s + AGAIN_S if times >= TRIES else now_s)
        if len(self._known) > MAX_DATASETS:
            self._known.popitem(last=False)

    def accepted(self, public_key: str, dataset: str) -> None:
        self._known.pop((public_key, dataset), None)

    def problem(self, public_key: str, dataset: str, now_s: float) -> tuple[R, str] | None:
        """Why a group of this key and dataset is refused without deriving its task; None if it may
        be derived. After `AGAIN_S` one may, and the next ones wait for its result as long again.
        """
        known = self._known.get((public_key, dataset))
        if known is None or known.times < TRIES:
            return None
        if now_s >= known.until_s:
            known.until_s = now_s + AGAIN_S
            return None
        reason, detail = known.problem
        return reason, f"{known.times} tasks of {dataset} differed here, so this one was not derived. The last: {detail}"


def apply_findings(reputation: Reputation, trust: Trust, found: Iterable[AbsurdText], after_batch: int, now_s: float) -> int:
    """Count the trainer's findings in batches after `after_batch` against the keys that they
    concern, in proportion, and never enough for quarantine. Returns the newest of these batches.
    """
    newest = after_batch
    for each in found:
        if each.batch <= after_batch:
            continue
        newest = max(newest, each.batch)
        public_key = trust.key_of(each.sender)
        if public_key is not None:
            part = min(1.0, each.absurd / each.answers)
            reputation.apply(Event(public_key, each.sender, LaterOffence.ABSURD, part, now_s))
    return newest
