"""The reputation of each key: a moving average of its offences, quarantine when it is high, and a
way back.

Pure; time is an argument. Changes are also kept as events, so that replicas can apply theirs to a
common state (`services.verifier.shared_reputation`). Keys, not names, have a reputation: a name in
a message is only a claim (`services.verifier.refusals`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.verifier.quarantine import Quarantine
from services.verifier.refusals import BLAME, Found, Offence, Refusal
from shared.contracts.senders import MAX_REPUTATIONS, KeyReputation

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

MAX_KEYS = 10_000
MAX_EVENTS = 10_000
"""Most events kept while the node plane is unreachable; older ones then count at this replica
only.
"""

_OFFENCES: dict[str, Offence] = {offence.value: offence for offence in (*Refusal, *Found)}


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

    def decayed(self, now_s: float) -> float:
        return float(self.suspicion * 0.5 ** (max(0.0, now_s - self.updated_s) / HALF_LIFE_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One key's reputation. `suspicion` is in [0, 1]; `refused` counts only refusals that are
    blamed on it.
    """

    public_key: str
    name: str
    suspicion: float
    accepted: int
    refused: dict[str, int]
    quarantined_s: float


class Reputation:
    """Suspicion per key: the exponentially weighted average over its judged groups, 0 for an
    accepted one and `BLAME` for the others.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._quarantine = Quarantine()
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
        """Record an accepted group."""
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
        return self._quarantine.strike(event.public_key, event.at_s)

    def remaining_s(self, public_key: str, now_s: float) -> float:
        """Remaining seconds of the key's quarantine; 0 if there is none."""
        return self._quarantine.remaining_s(public_key, now_s)

    def accepted(self, public_key: str) -> int:
        """Number of accepted groups of this key."""
        record = self._records.get(public_key)
        return record.accepted if record else 0

    def suspicion(self, public_key: str, now_s: float) -> float:
        """Suspicion in [0, 1]; 0 for a key without offences."""
        record = self._records.get(public_key)
        return record.decayed(now_s) if record else 0.0

    def quarantined(self, now_s: float) -> int:
        """Number of keys in quarantine."""
        return self._quarantine.count(now_s)

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
            self._records[each.public_key] = _Record(each.name, each.suspicion, each.updated_at, each.accepted, Counter(refused))
            self._quarantine.restore(each.public_key, each.quarantined_until, each.quarantine_s)
        self._forget_oldest()
        for event in events:
            if event.public_key in adopted:  # otherwise this replica's own record contains it
                self.apply(event)

    def records(self, now_s: float) -> list[KeyReputation]:
        """What the common state keeps: the worst keys, and those with most accepted groups, at most
        `MAX_REPUTATIONS`.
        """
        worst = sorted(self._records, key=lambda key: (-self.remaining_s(key, now_s), -self.suspicion(key, now_s)))
        best = sorted(self._records, key=lambda key: -self._records[key].accepted)
        kept = dict.fromkeys((*worst[: MAX_REPUTATIONS // 2], *best[: MAX_REPUTATIONS // 2]))
        return [self._kept(key) for key in sorted(kept)]

    def worst(self, count: int, now_s: float) -> list[Standing]:
        """At most `count` keys with offences: those in quarantine first, then by suspicion."""
        offenders = [self._standing(key, record, now_s) for key, record in self._records.items() if record.refused]
        return sorted(offenders, key=lambda each: (-each.quarantined_s, -each.suspicion, each.name))[:count]

    def _standing(self, key: str, record: _Record, now_s: float) -> Standing:
        return Standing(
            public_key=key,
            name=record.name,
            suspicion=record.decayed(now_s),
            accepted=record.accepted,
            refused={reason.value: number for reason, number in sorted(record.refused.items(), key=lambda each: each[0].value)},
            quarantined_s=self.remaining_s(key, now_s),
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
        until_s, length_s = self._quarantine.term(public_key)
        return KeyReputation(
            public_key=public_key,
            name=record.name,
            suspicion=round(record.suspicion, 6),
            updated_at=record.updated_s,
            accepted=record.accepted,
            refused={offence.value: count for offence, count in record.refused.items()},
            quarantined_until=until_s,
            quarantine_s=length_s,
        )
