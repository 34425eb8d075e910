"""Weighted draws without replacement, as in drawing one entry after the other with chances in proportion to the weights.

Efraimidis and Spirakis (2006): give each entry the key `u ** (1 / weight)` with u uniform and take the largest keys. In logarithms
that is `log(weight)` plus a Gumbel variate, which does not overflow. Passing over entries of a node that has its share is the same
as taking them out of the urn, so the law holds under the cap too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from services.sampler.pool import PoolEntry

_TINY = 5e-324


def draw_weighted(
    entries: Sequence[PoolEntry], weights: Sequence[float], wanted: int, cap: int, rng: random.Random
) -> list[PoolEntry]:
    """Up to `wanted` different entries, at most `cap` of one node, in the order in which they are drawn.

    weights: one an entry, 0 or more, on any scale; an entry of weight 0 is drawn when there is no other left.
    """
    keys = [math.log(max(weight, _TINY)) + _gumbel(rng) for weight in weights]
    chosen: list[PoolEntry] = []
    taken: Counter[str] = Counter()
    for index in sorted(range(len(entries)), key=lambda index: (-keys[index], entries[index].seq)):
        entry = entries[index]
        if len(chosen) < wanted and taken[entry.node] < cap:
            taken[entry.node] += 1
            chosen.append(entry)
    return chosen


def _gumbel(rng: random.Random) -> float:
    return -math.log(-math.log(max(rng.random(), _TINY)))
