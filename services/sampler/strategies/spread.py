"""Draws in proportion to the standard deviation of a group's rewards, because answers that differ
most teach most.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from services.sampler.strategies.base import weighted


def _weigh(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    return [entry.reward_std for entry in entries]


STRATEGY = weighted("spread", _weigh)
