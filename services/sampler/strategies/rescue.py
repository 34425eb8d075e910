"""Draws groups with a success on a source where this node's policy fails before all others."""

from __future__ import annotations

from collections.abc import Sequence

from services.sampler.pool import Knowledge, PoolEntry
from services.sampler.strategies.base import LAST, weighted


def _weigh(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    """Groups with a success on a source that this node's policy fails on come first, all with the
    same weight; then the others, all with the same weight.

    This is the success-gated sharing of Mutual RL (arXiv 2605.07244), by task source instead of by
    question. If there is nothing to rescue all weights are equal, which is the uniform draw.
    """
    failing = {source for source in {entry.source for entry in entries} if knowledge.pass_record(source).all_fail}
    return [1.0 if entry.has_pass and entry.source in failing else LAST for entry in entries]


STRATEGY = weighted("rescue", _weigh)
