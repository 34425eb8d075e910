"""Draws from task sources on which this node's policy sometimes passes and sometimes fails."""

from __future__ import annotations

from collections.abc import Sequence

from services.sampler.pool import Knowledge, PoolEntry
from services.sampler.strategies.base import weighted


def _weigh(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    """E[p(1 - p)] under Beta(1 + passes, 1 + failures): the expected variance of this node's
    rewards on that source.

    An unknown source has 1/6, more than one that is known to pass less than a fifth of the time, so
    that it is tried.
    """

    def of(source: str) -> float:
        own = knowledge.pass_record(source)
        passes, failures = 1.0 + own.passes, 1.0 + max(0.0, own.completions - own.passes)
        return passes * failures / ((passes + failures) * (passes + failures + 1.0))

    by_source = {source: of(source) for source in {entry.source for entry in entries}}
    return [by_source[entry.source] for entry in entries]


STRATEGY = weighted("learnability", _weigh)
