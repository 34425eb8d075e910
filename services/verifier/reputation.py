"""Knowledge of each key: a moving average of its offences with quarantine and a way back, the share
of the intake that it has earned, what its groups cost, and how replicas share that.

Keys, not names, have a reputation: a name in a message is only a claim
(`services.verifier.refusals`). All but the last two classes are pure and take time as an argument.
Changes are also kept as events, so that replicas can apply theirs to a common state
(`SharedReputation`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.verifier.figures import Figures
from services.verifier.refusals import BLAME, LaterOffence, Offence, Problem, Refusal
from services.verifier.trust import Bans, RosterKeys, Trust
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.senders import (
    MAX_REPUTATIONS,
    MAX_SENDERS,
    AbsurdText,
    BanList,
    KeyReputation,
    ReputationState,
    SendersReport,
    SenderStanding,
    TrainerFindings,
)
from shared.contracts.subjects import BANS_KEY, FINDINGS_KEY, REPUTATION_KEY, SENDERS_PREFIX
from shared.contracts.wire import MessageError
from shared.identity.roster import RosterError
from shared.runtime.logs import Log
from shared.transport.base import Conflict, Transport, TransportError

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

_OFFENCES: dict[str, Offence] = {offence.value: offence for offence in (*Refusal, *LaterOffence)}


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
    refused: Counter[Offence] = field(default_factory=Counter)
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
    accepted one and `BLAME` for the others.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def blame(self, public_key: str, name: str, reason: Offence, now_s: float, part: float = 1.0) -> float:
        """Record an offence. Returns the seconds for which it quarantines the key, 0 for none.

        `part`, in [0, 1]: of the group. A judgement on the cost of many groups (`SCORING_COST`) is
        sufficient by itself.
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
        record = self._move(event.public_key, event.name, BLAME[offence] * event.part, event.at_s)
        record.refused[offence] += 1
        if offence is not Refusal.SCORING_COST and record.suspicion <= LIMIT:
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
            refused = {_OFFENCES[reason]: count for reason, count in each.refused.items() if reason in _OFFENCES}
            self._records.pop(each.public_key, None)
            terms = each.quarantined_until, min(each.quarantine_s, LONGEST_S)
            self._records[each.public_key] = _Record(
                each.name, each.suspicion, each.updated_at, each.accepted, Counter(refused), *terms
            )
        self._forget_oldest()
        for event in events:
            if event.public_key in adopted:  # otherwise this replica's own record contains it
                self.apply(event)

    def records(self, now_s: float) -> list[KeyReputation]:
        """Select what the common state keeps: the worst keys, and those with most accepted groups,
        at most `MAX_REPUTATIONS`.
        """
        worst = sorted(self._records, key=lambda key: (-self.remaining_s(key, now_s), -self.suspicion(key, now_s)))
        best = sorted(self._records, key=lambda key: -self._records[key].accepted)
        kept = dict.fromkeys((*worst[: MAX_REPUTATIONS // 2], *best[: MAX_REPUTATIONS // 2]))
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
            refused={reason.value: number for reason, number in sorted(record.refused.items(), key=lambda each: each[0].value)},
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
            refused={offence.value: count for offence, count in record.refused.items()},
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


@dataclass(slots=True)
class _Difference:
    problem: Problem
    times: int
    until_s: float


class TaskDifferences:
    """Remembers the datasets whose tasks come out otherwise here than a key's node said, or cannot
    be derived or judged here. Deriving one takes a process and up to a second of CPU time, so a key
    cannot have that done for each of its messages.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], _Difference] = OrderedDict()

    def refused(self, public_key: str, dataset: str, problem: Problem, now_s: float) -> None:
        """Record a group of this key whose task differs here."""
        earlier = self._known.pop((public_key, dataset), None)
        times = earlier.times + 1 if earlier else 1
        self._known[public_key, dataset] = _Difference(problem, times, now_s + AGAIN_S if times >= TRIES else now_s)
        if len(self._known) > MAX_DATASETS:
            self._known.popitem(last=False)

    def accepted(self, public_key: str, dataset: str) -> None:
        self._known.pop((public_key, dataset), None)

    def problem(self, public_key: str, dataset: str, now_s: float) -> Problem | None:
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


class SharedReputation:
    """The reputation of keys in the node's bucket, so that it survives a restart and all replicas
    share it.

    Each replica applies its events to the common state by compare-and-set and adopts the result.
    The replica that reads the trainer's findings of absurd text first applies them; the state
    records up to which batch. A state that cannot be read is discarded: all senders are newcomers
    again, which costs nobody anything while there is room.
    """

    def __init__(self, node_id: str, node: Transport, reputation: Reputation, trust: Trust, log: Log) -> None:
        self._bucket = subjects.node_bucket(node_id)
        self._node = node
        self._reputation = reputation
        self._trust = trust
        self._log = log
        self._unreadable_revision = 0

    async def exchange(self, now_s: float) -> None:
        """Apply this replica's events and the trainer's findings, and adopt what happened at other
        replicas.

        Raises:
            TransportError: the node plane does not answer. Nothing is lost; the next exchange
                includes it.
        """
        state, revision = await self._read()
        findings = await self._findings()
        events = self._reputation.take_events()
        self._reputation.adopt(state.keys, events)
        found = findings.found if findings is not None else ()
        newest = apply_findings(self._reputation, self._trust, found, state.findings_batch, now_s)
        after = ReputationState(findings_batch=newest, keys=self._reputation.records(now_s))
        if after == state:
            return
        try:
            await self._node.kv.update(self._bucket, REPUTATION_KEY, encode(after), last_revision=revision)
        except Conflict:
            self._reputation.keep_events(events)
        except TransportError:
            self._reputation.keep_events(events)
            raise

    async def _read(self) -> tuple[ReputationState, int]:
        entry = await self._node.kv.get(self._bucket, REPUTATION_KEY)
        if entry is None:
            return ReputationState(), 0
        try:
            return decode(entry.value, ReputationState), entry.revision
        except MessageError as error:
            self._log.error(
                "reputation_unreadable", reason=str(error), consequence="it is created anew from what this replica knows"
            )
            return ReputationState(), entry.revision

    async def _findings(self) -> TrainerFindings | None:
        entry = await self._node.kv.get(self._bucket, FINDINGS_KEY)
        if entry is None or entry.revision == self._unreadable_revision:
            return None
        try:
            return decode(entry.value, TrainerFindings)
        except MessageError as error:
            self._unreadable_revision = entry.revision
            self._log.error("findings_unreadable", reason=str(error), remedy="run the same version of all of a node's services")
            return None


WATCH_PERIOD_S = 1.0
REPORT_PERIOD_S = 5.0
COMPLAIN_EVERY_S = 60.0


class SenderWatch:
    """Keeps the border's lists of senders up to date (bans from the node's bucket, the roster from
    its file, the shared reputation) and reports the worst senders.

    It polls, because a watch can die silently: a ban takes effect within `WATCH_PERIOD_S` plus the
    time of one request.
    """

    def __init__(
        self,
        node_id: str,
        replica: str,
        node: Transport,
        bans: Bans,
        reputation: Reputation,
        trust: Trust,
        figures: Figures,
        log: Log,
    ) -> None:
        self._id = node_id
        self._report_key = SENDERS_PREFIX + replica
        self._node = node
        self._bans, self._known = bans, reputation
        self._roster = trust if isinstance(trust, RosterKeys) else None
        self._reputation = SharedReputation(node_id, node, reputation, trust, log)
        self._figures = figures
        self._log = log
        self._revision = 0
        self._read_bans = False
        self._complained_at = 0.0
        self._reported: list[SenderStanding] = []

    async def run(self) -> None:
        reported_at = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            try:
                await self.look()
                if time.monotonic() - reported_at >= REPORT_PERIOD_S:
                    reported_at = time.monotonic()
                    await self._reputation.exchange(time.time())
                    await self.report(time.time())
            except TransportError as error:
                self._log.debug("bans_not_read", reason=str(error))

    async def begin(self) -> None:
        """Learn what is known of senders already. Raises TransportError."""
        await self._reputation.exchange(time.time())
        await self.look()

    async def look(self) -> None:
        """Read the bans and, if there is one, the roster. If one cannot be read, the previous list
        stays in force; without a previous list of bans, no foreign group is accepted.

        Raises:
            TransportError: the node plane does not answer.
        """
        self._read_roster()
        entry = await self._node.kv.get(subjects.node_bucket(self._id), BANS_KEY)
        if entry is not None and entry.revision != self._revision:
            self._revision = entry.revision
            try:
                listed = decode(entry.value, BanList)
            except MessageError as error:
                if not self._read_bans:
                    self._bans.unreadable = f"this node's list of bans cannot be read ({error})"
                self._say_unreadable(str(error))
            else:
                self._read_bans = True
                self._bans.replace(listed)
                self._log.info("bans", senders=[ban.sender for ban in listed.bans][:20])
        if self._bans.unreadable and time.monotonic() - self._complained_at >= COMPLAIN_EVERY_S:
            self._say_unreadable(self._bans.unreadable)
        self._bans.refresh()
        now_s = time.time()
        self._figures.border.left_out(self._known.quarantined(now_s), self._bans.count(now_s))

    def _say_unreadable(self, reason: str) -> None:
        self._complained_at = time.monotonic()
        self._log.error(
            "bans_unreadable",
            reason=reason,
            consequence="no foreign group is accepted" if self._bans.unreadable else "the earlier bans stay in force",
            remedy="start the version that wrote the list, or start a new one: `swarm ban NAME --anew`",
        )

    async def report(self, now_s: float) -> None:
        worst = self._known.worst(MAX_SENDERS, now_s)
        if worst != self._reported:
            report = SendersReport(node=self._id, updated_at=now_s, worst=worst)
            await self._node.kv.put(subjects.node_bucket(self._id), self._report_key, encode(report))
            self._reported = worst

    def _read_roster(self) -> None:
        if self._roster is None:
            return
        try:
            if self._roster.reload():
                self._log.info("roster", nodes=len(self._roster))
        except RosterError as error:
            self._log.error("roster_unusable", reason=str(error), consequence="the previous roster stays in force")
