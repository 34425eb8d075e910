"""Bans cover name and key, so that a banned node cannot return by changing either. Pure; time is an
argument.
"""

from __future__ import annotations

from services.verifier.trust import Trust
from shared.contracts.senders import Ban, BanList


class Bans:
    """The bans in force. A banned name bans the key it belongs to; a banned key bans every name
    that it signs for.
    """

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._bans: dict[str, Ban] = {}
        self._by_key: dict[str, Ban] = {}
        self._keys: dict[str, frozenset[str | None]] = {}
        self.unreadable = ""
        """Why the bans are unknown. Until a list can be read, every sender counts as banned."""

    def count(self, now_s: float) -> int:
        """Number of bans in force."""
        return sum(_in_force(ban, now_s) is not None for ban in self._bans.values())

    def replace(self, listed: BanList) -> None:
        """Replace all bans by these."""
        self.unreadable = ""
        self._bans = {ban.sender: ban for ban in listed.bans}
        self.refresh()

    def refresh(self) -> None:
        """Look up again which keys the banned names belong to."""
        # The ban of the key stays even if its name expires or is given up.
        self._keys = {sender: self._keys.get(sender, frozenset()) | {self._trust.key_of(sender)} for sender in self._bans}
        self._by_key = {key: self._bans[sender] for sender, keys in self._keys.items() for key in keys if key is not None}

    def ban_for_name(self, name: str | None, now_s: float) -> Ban | None:
        """The ban on a name that a message claims."""
        return _in_force(self._bans.get(name or ""), now_s)

    def ban_for_key(self, public_key: str, now_s: float) -> Ban | None:
        """The ban on a key that a message names."""
        return _in_force(self._bans.get(public_key), now_s) or _in_force(self._by_key.get(public_key), now_s)


def _in_force(ban: Ban | None, now_s: float) -> Ban | None:
    return ban if ban is not None and (ban.until is None or ban.until > now_s) else None
