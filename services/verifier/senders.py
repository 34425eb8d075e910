"""Determines whose share of the intake and of a batch a group uses, and how large that share is: by
key if it is known. Pure; time is an argument.

All keys that were repeatedly caught copying foreign groups share one sender's quota, so a cluster
that sends the same material under many keys gains nothing by their number. A key leaves that set an
hour after it was last caught.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.verifier.reputation import Reputation
from services.verifier.standing import LEAST, earned
from services.verifier.trust import Trust

COPIERS = "~copiers"
"""The share of all keys caught copying; it is neither a node's name nor a key."""

CAUGHT = 3
"""Copies that chance cannot explain, within `CAUGHT_S`, before a key counts as a copier. A single
one may come from a node that was restored.
"""

CAUGHT_S = 3600.0
MAX_CAUGHT = 10_000


@dataclass(frozen=True, slots=True)
class Sender:
    """`share`: messages with equal values count against the same share. `earned`: the part of a
    whole share that it has earned, see `standing`.
    """

    share: str
    earned: float
    known: bool
    """Whether the key is known; otherwise `share` is only a name that the subject claims."""

    @property
    def established(self) -> bool:
        """Whether it has earned a whole share."""
        return self.earned >= 1.0


@dataclass(slots=True)
class _Caught:
    times: int
    last_s: float


class Senders:
    """Looks up senders in the records of names, keys and reputations."""

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
        return self.by_key(key, now_s) if key is not None else Sender(name, earned(0, 0.0, self._needed), known=False)

    def by_key(self, public_key: str, now_s: float) -> Sender:
        """The sender of a message that this key has signed."""
        if self.is_copier(public_key, now_s):
            return Sender(COPIERS, LEAST, known=True)
        accepted, suspicion = self._reputation.accepted(public_key), self._reputation.suspicion(public_key, now_s)
        return Sender(public_key, earned(accepted, suspicion, self._needed), known=True)

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
        """Whether this key was caught often enough recently."""
        caught = self._caught.get(public_key)
        return caught is not None and caught.times >= CAUGHT and now_s - caught.last_s <= CAUGHT_S
