"""Contested groups first: draws most often the foreign groups with about half of their completions
right.

[sampler]
strategy = "contested"
"""

from __future__ import annotations

from collections.abc import Sequence

from services.sampler.pool import Knowledge, PoolEntry
from services.sampler.strategies.base import weighted


def weigh(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    """p (1 - p) for each group, where p is its mean reward. Never 0, so that every group can be
    drawn if no other is left.
    """
    return [max(1e-6, entry.mean_reward * (1.0 - entry.mean_reward)) for entry in entries]


STRATEGY = weighted("contested", weigh)
