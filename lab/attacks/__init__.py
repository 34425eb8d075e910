"""The attacks of hostile nodes, one per file. Each turns what the node knows (`view.Hostile`) into
groups.

Only groups are made here; keys, messages and the honest nodes' borders belong to the simulation.
Randomness is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lab.attacks.copies import duplicates, floods, near_copies
from lab.attacks.forged import forged_tokens
from lab.attacks.gamed import gamed
from lab.attacks.informed import informed, many_names, sleeper
from lab.attacks.opposed import opposed
from lab.attacks.padded import padded
from lab.attacks.shortcut import shortcut
from lab.attacks.starve import starve
from lab.attacks.view import Hostile, as_sampled
from lab.attacks.wrong import wrong
from shared.contracts.messages import RolloutGroup

__all__ = ["ATTACKS", "INFORMED_ROLES", "Hostile"]

ATTACKS: Mapping[str, Callable[[Hostile], list[RolloutGroup]]] = {
    "wrong": wrong,
    "duplicate": duplicates,
    "flood": floods,
    "low_quality": as_sampled,
    "forged_tokens": forged_tokens,
    "near_copies": near_copies,
    "padded": padded,
    "gamed": gamed,
    "many_names": many_names,
    "sleeper": sleeper,
    "informed": informed,
    "opposed": opposed,
    "shortcut": shortcut,
    "starve": starve,
}
"""The attack of each hostile role."""

INFORMED_ROLES = frozenset(
    {"forged_tokens", "near_copies", "padded", "gamed", "many_names", "sleeper", "informed", "opposed", "shortcut", "starve"}
)
"""Roles that sample from the first honest node's current policy, which is the most that an attacker
could know.
"""
