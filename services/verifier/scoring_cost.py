"""Tracks what each key's groups cost in the scorers, and decides when that is too much. Pure; time
is an argument.

Every hang costs something, but a single slow answer is no offence: a key may use `GRACE_S` seconds
of CPU time, and `PER_GROUP_S` more for each of its accepted groups. Both decay with the half-life
`HALF_LIFE_S`. CPU time, not wall-clock time, counts, so that a busy machine blames nobody. What a
key costs at any one moment is already limited by the group's deadline and by the fair division of
the scorers' time by key (`shared.tasks.sandbox.fair_share`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

GRACE_S = 15.0
PER_GROUP_S = 0.5
"""Groups of eight answers to reasoning-gym's datasets cost 0.01 s at the median and 0.23 s at most,
including the fork.
"""
HALF_LIFE_S = 600.0
MAX_KEYS = 10_000


@dataclass(slots=True)
class _Account:
    spent_s: float = 0.0
    groups: float = 0.0
    updated_s: float = 0.0


class ScoringCost:
    """One account per key; the one that was unused for longest is forgotten first."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def charge(self, public_key: str, cpu_s: float, *, accepted: bool, now_s: float) -> bool:
        """Record a group and its cost. True if the key has now cost too much; it then starts again
        with half of the grace.
        """
        account = self._accounts.setdefault(public_key, _Account(updated_s=now_s))
        self._accounts.move_to_end(public_key)
        if len(self._accounts) > MAX_KEYS:
            self._accounts.popitem(last=False)
        kept = 0.5 ** (max(0.0, now_s - account.updated_s) / HALF_LIFE_S)
        account.spent_s = account.spent_s * kept + cpu_s
        account.groups = account.groups * kept + accepted
        account.updated_s = max(account.updated_s, now_s)
        if account.spent_s <= GRACE_S + PER_GROUP_S * account.groups:
            return False
        self._accounts[public_key] = _Account(spent_s=GRACE_S / 2, updated_s=now_s)
        return True
