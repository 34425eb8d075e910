"""Draws evenly over task sources first and nodes second, whatever the pool holds most of."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from services.sampler.strategies.base import Strategy, has_advantage


def _draw(entries: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random, knowledge: Knowledge) -> list[PoolEntry]:
    """Up to `wanted` different entries, at most `cap` of one node.

    Each in turn is of a source taken from least so far, and there of a node taken from least;
    chance decides between sources, then between nodes, then between groups, so that a source's or
    node's chance does not grow with the groups it has in the pool.
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
