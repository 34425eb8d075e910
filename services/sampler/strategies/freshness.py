"""Draws the newest groups before older ones."""

from __future__ import annotations

from collections.abc import Sequence

from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from services.sampler.strategies.base import LAST, weighted


def _weigh(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    """Half the weight for every J newer groups, a scale that needs no clock and suits a slow swarm
    as well as a fast one.
    """
    newest_first = sorted(range(len(entries)), key=lambda i: (-min(entries[i].created_at, entries[i].received_at), -entries[i].seq))
    weights = [0.0] * len(entries)
    for newer, index in enumerate(newest_first):
        weights[index] = max(LAST, 2.0 ** (-newer / max(1, wanted)))
    return weights


STRATEGY = weighted("freshness", _weigh)
