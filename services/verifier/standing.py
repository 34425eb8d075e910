"""The share that a sender has earned: small at first, whole after enough accepted groups, and
smaller again with suspicion. Pure.

Shares matter only when there is not enough for all. Unused capacity goes to whoever is there, so
that a young swarm, in which every node is new, works at full speed. The same holds for all
newcomers together (`services.verifier.fair_queue`).
"""

from __future__ import annotations

from services.verifier.reputation import LIMIT

ESTABLISHED = 1.0
"""The whole share, of a sender with enough accepted groups and little suspicion."""

LEAST = 1 / 64
"""No sender's share falls below this, so that every sender is served eventually."""

TOLERATED = LIMIT / 4
"""Suspicion up to this has no effect, so that an honest sender's single offence (0.1 at most) is
forgiven.
"""


def earned(accepted: int, suspicion: float, needed: int) -> float:
    """A sender's share in (0, 1]: `ESTABLISHED` with at least `needed` accepted groups (0: at once)
    and suspicion up to `TOLERATED`.

    It grows in proportion to the accepted groups and falls linearly with the suspicion, to its
    minimum where quarantine begins.
    """
    grown = min(ESTABLISHED, (1 + accepted) / (1 + needed))
    lost = max(0.0, suspicion - TOLERATED) / (LIMIT - TOLERATED)
    return max(LEAST, grown * (1.0 - min(1.0, lost)))
