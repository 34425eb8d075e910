"""The arithmetic of a draw: how many groups one node may have, and how entries are taken in a given
order. Pure.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence

from services.sampler.pool import PoolEntry

_TINY = 5e-324


def part_of(wanted: int, part: float) -> int:
    """The fraction `part` of `wanted`, rounded down without binary rounding errors: 0.3 of 10 is
    3.
    """
    return math.floor(wanted * part + 1e-9)


def node_cap(wanted: int, max_share: float, nodes: int) -> int:
    """How many of `wanted` foreign groups may come from one node if there are `nodes` other nodes.

    A share of `max_share`, rounded down, but never less than an equal part (rounded up): the cap
    keeps one node from dominating, and must not leave places empty that no other node may fill.
    With one other node there is no cap.
    """
    if nodes <= 1:
        return wanted
    return min(wanted, max(1, part_of(wanted, max_share), math.ceil(wanted / nodes)))


def available(entries: Iterable[PoolEntry], wanted: int, cap: int) -> int:
    """How many entries a draw can give."""
    return min(wanted, sum(min(count, cap) for count in Counter(entry.node for entry in entries).values()))


def candidates(pool: int, wanted: int, oversample: float) -> int:
    """How many groups to draw from a pool of `pool` groups if the trainer keeps `wanted` of them.

    `oversample` times as many. But drawn groups that the trainer does not keep are lost, so enough
    groups for one batch are left for the next.
    """
    return max(wanted, min(math.ceil(wanted * oversample), pool - wanted))


def in_order(entries: Iterable[PoolEntry], wanted: int, cap: int) -> list[PoolEntry]:
    """The first `wanted` of `entries`, skipping those of a node that already has `cap`."""
    chosen: list[PoolEntry] = []
    taken: Counter[str] = Counter()
    for entry in entries:
        if len(chosen) < wanted and taken[entry.node] < cap:
            taken[entry.node] += 1
            chosen.append(entry)
    return chosen


def weighted_order(entries: Sequence[PoolEntry], weights: Sequence[float], rng: random.Random) -> list[PoolEntry]:
    """All entries in random order, as if drawn one after the other without replacement, with
    chances proportional to the weights.

    weights: one per entry, 0 or more, on any scale; an entry of weight 0 comes after all others.

    Efraimidis and Spirakis (2006): give each entry the key `u ** (1 / weight)` with u uniform and
    take the largest keys. In logarithms that is `log(weight)` plus a Gumbel variate, which does not
    overflow. Skipping entries of a node that has its share is the same as removing them from the
    urn, so the distribution also holds under the cap.
    """
    keys = [math.log(max(weight, _TINY)) + _gumbel(rng) for weight in weights]
    return [entries[index] for index in sorted(range(len(entries)), key=lambda index: (-keys[index], entries[index].seq))]


def _gumbel(rng: random.Random) -> float:
    return -math.log(-math.log(max(rng.random(), _TINY)))


def local_order(entry: PoolEntry) -> tuple[int, int, int]:
    """Sort key of local groups: oldest policy first, which bounds staleness, then in the order in
    which tasks were drawn.

    The draw comes before the position because parallel scorers deliver in any order, and batches
    should not depend on that.
    """
    return (entry.policy_version, entry.draw, entry.seq)
