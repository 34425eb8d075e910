"""The interface of a strategy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.sampler.draws import in_order, weighted_order
from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from services.sampler.strategies.weights import Weigh, weights_of

Prefers = Literal["near", "far"]
LAST = 2.0**-60
"""A weight so small that its entry is practically never chosen while one of weight 1 is left."""

Draw = Callable[[Sequence[PoolEntry], int, int, random.Random, Knowledge], list[PoolEntry]]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to choose foreign groups, as registered in the entry-point group `swarm.strategies`.

    keeps(entry): at arrival, whether it can ever be chosen; other entries take no room in the pool.
    draw(entries, wanted, cap, rng, knowledge): `available(entries, wanted, cap)` different entries,
    in training order, at most `cap` of one node, with `rng` as the only source of randomness; a
    draw that returns anything else ends the sampler (`contract`).
    `entries` are in order of arrival. weigh(entries, wanted, knowledge): their weights in the draw,
    above 0, on any scale (`weights.weights_of`); None for a strategy without weights. prefers: the
    trainer, which has the model, keeps the likeliest (`near`) or least likely (`far`) of more
    candidates.
    """

    name: str
    keeps: Callable[[PoolEntry], bool]
    draw: Draw
    weigh: Weigh | None = None
    prefers: Prefers | None = None


def has_advantage(entry: PoolEntry) -> bool:
    """The paper's filter (arXiv 2509.08721, section 3): a group whose rewards are all equal teaches
    nothing.
    """
    return entry.informative


def draw_uniformly(
    entries: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random, knowledge: Knowledge
) -> list[PoolEntry]:
    """A uniform draw that skips a node's groups beyond its cap."""
    return in_order(rng.sample(entries, len(entries) if cap < wanted else min(wanted, len(entries))), wanted, cap)


def weighted(name: str, weigh: Weigh) -> Strategy:
    """The strategy that draws informative groups without replacement, with the weights from
    `weigh`.
    """

    def draw(entries: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random, knowledge: Knowledge) -> list[PoolEntry]:
        return in_order(weighted_order(entries, weights_of(name, weigh, entries, wanted, knowledge), rng), wanted, cap)

    return Strategy(name, keeps=has_advantage, draw=draw, weigh=weigh)
