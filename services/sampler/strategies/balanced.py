"""Draws evenly first over task sources and then over nodes, regardless of what the pool has most
of.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from services.sampler.strategies.base import Strategy, has_advantage


def _draw(entries: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random, knowledge: Knowledge) -> list[PoolEntry]:
    """Up to `wanted` different entries, at most `cap` of one node.

    Each entry comes from a source taken from least so far, and within it from a node taken from
    least. Ties are broken at random between sources, then between nodes, then between groups, so
    that the chance of a source or node does not grow with its number of groups in the pool.
    """
    left: dict[str, dict[str, list[PoolEntry]]] = {}
    for entry in entries:
        left.setdefault(entry.source, {}).setdefault(entry.node, []).append(entry)
    chosen: list[PoolEntry] = []
    per_source: Counter[str] = Counter()
    per_node: Counter[str] = Counter()
    while len(chosen) < wanted:
        open_nodes = {source: [node for node in nodes if per_node[node] < cap] for source, nodes in left.items()}
        sources = [source for source, nodes in open_nodes.items() if nodes]
        if not sources:
            break
        source = _least(sources, per_source, rng)
        node = _least(open_nodes[source], per_node, rng)
        groups = left[source][node]
        chosen.append(groups.pop(rng.randrange(len(groups))))
        if not groups:
            del left[source][node]
        per_source[source] += 1
        per_node[node] += 1
    return chosen


def _least(names: Sequence[str], taken: Counter[str], rng: random.Random) -> str:
    fewest = min(taken[name] for name in names)
    return rng.choice([name for name in names if taken[name] == fewest])


STRATEGY = Strategy("balanced", keeps=has_advantage, draw=_draw)
