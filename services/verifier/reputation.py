"""What each key's groups were worth so far: a moving average of its offences, quarantine when it is high, and a way back.

Pure: time is an argument. Keys, not names, have a reputation: a name in a message is only a claim (`services.verifier.refusals`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from services.verifier.quarantine import Quarantine
from services.verifier.refusals import BLAME, Refusal

STEP = 0.1
"""Weight of the newest group in the moving average: seven offences in a row, or half of many, are too much."""

LIMIT = 0.5
"""Suspicion above this means quarantine."""

PAROLE = LIMIT / 2
"""Suspicion after a quarantine: four more offences bring the next one, which is longer."""

HALF_LIFE_S = 600.0
"""Suspicion halves in this time even when nothing comes."""

MAX_KEYS = 10_000


@dataclass(slots=True)
class _Record:
    name: str
    suspicion: float = 0.0
    updated_s: float = 0.0
    accepted: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)

    def decayed(self, now_s: float) -> float:
        return float(self.suspicion * 0.5 ** (max(0.0, now_s - self.updated_s) / HALF_LIFE_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One key's reputation. `suspicion` is in [0, 1]; `refused` counts only what it can be blamed for."""

    public_key: str
    name: str
    suspicion: float
    accepted: int
    refused: dict[str, int]
    quarantined_s: float


class Reputation:
    """Suspicion per key: the exponentially weighted average of its judged groups, 0 for an accepted one, `BLAME` for the others."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._quarantine = Quarantine()

    def blame(self, public_key: str, name: str, reason: Refusal, now_s: float) -> float:
        """Note an offence. Returns the seconds for which the key is left out because of it, 0 for none.

        A group that made a scorer hang costs far more than it cost to send, so that one is enough.
        """
        record = self._move(public_key, name, BLAME[reason], now_s)
        record.refused[reason] += 1
        if reason is not Refusal.SCORING_TIMEOUT and record.suspicion <= LIMIT:
            return 0.0
        record.suspicion = min(record.suspicion, PAROLE)
        return self._quarantine.strike(public_key, now_s)

    def credit(self, public_key: str, name: str, now_s: float) -> None:
        """Note an accepted group."""
        self._move(public_key, name, 0.0, now_s).accepted += 1

    def remaining_s(self, public_key: str, now_s: float) -> float:
        """How long the key is still left out; 0 when it is not."""
        return self._quarantine.remaining_s(public_key, now_s)

    def suspicion(self, public_key: str, now_s: float) -> float:
        """In [0, 1]; 0 for a key that nothing is held against."""
        record = self._records.get(public_key)
        return record.decayed(now_s) if record else 0.0

    def quarantined(self, now_s: float) -> int:
        """How many keys are left out now."""
        return self._quarantine.count(now_s)

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
        if len(self._records) > MAX_KEYS:
            del self._records[next(iter(self._records))]
        before = record.decayed(now_s)
        record.name, record.updated_s = name, max(record.updated_s, now_s)
        record.suspicion = before + STEP * (weight - before)
        return record
