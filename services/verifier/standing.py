"""The share that a sender has earned: small at first, whole after enough accepted groups, and
smaller again with suspicion. Pure.

Shares matter only when there is not enough for all: unused capacity goes to whoever is there, so
that a young swarm, in which everybody is new, works at full speed. The same holds for all newcomers
together (`services.verifier.fair_queue`).
"""

from __future__ import annotations

from services.verifier.reputation import LIMIT

ESTABLISHED = 1.0
"""The whole share: that of a sender with enough accepted groups and little held against it."""

LEAST = 1 / 64
"""No sender's share falls below this, so that everybody is heard in the end."""

TOLERATED = LIMIT / 4
"""Suspicion up to this costs nothing: an honest sender's stray offence (0.1 at most) is forgiven.
"""


def earned(accepted: int, suspicion: float, needed: int) -> float:
    """A sender's share in (0, 1]: `ESTABLISHED` from `needed` accepted groups on (0: at once), with
    suspicion up to `TOLERATED`.

    It grows in proportion to the accepted groups, and falls in proportion to the suspicion, to
    nothing where quarantine begins.
    """
    grown = min(1.0, (1 + accepted) / (1 + needed))
    lost = max(0.0, suspicion - TOLERATED) / (LIMIT - TOLERATED)
    return max(LEAST, grown * (1.0 - min(1.0, lost)))
