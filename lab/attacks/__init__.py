"""The attacks of hostile nodes, one per file. Each turns what the node knows (`view.Hostile`) into
groups.

Only groups are made here; keys, messages and the honest nodes' borders belong to the simulation.
Randomness is an argument. Hostile nodes sample from the first honest node's current policy, which
is the most that an attacker could know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lab.attacks.informed import informed
from lab.attacks.opposed import opposed
from lab.attacks.shortcut import shortcut
from lab.attacks.starve import starve
from lab.attacks.view import Hostile
from shared.contracts.messages import RolloutGroup

__all__ = ["ATTACKS", "Hostile"]

ATTACKS: Mapping[str, Callable[[Hostile], list[RolloutGroup]]] = {
    "informed": informed,
    "opposed": opposed,
    "shortcut": shortcut,
    "starve": starve,
}
"""The attack of each hostile role."""
