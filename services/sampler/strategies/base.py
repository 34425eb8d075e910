"""The interface of a strategy, and what holds its draws and weights to their promise.

A batch of other groups than were asked for would be trained on without a word, and a batch that
tells of an infinite weight could not be read again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.sampler.draws import available, in_order, weighted_order
from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from shared.registry import STRATEGIES
from shared.returned_numbers import finite_numbers
from shared.runtime.errors import FatalError

Weigh = Callable[[Sequence[PoolEntry], int, Knowledge], list[float]]


class StrategyError(FatalError):
    """A strategy drew or weighed as it must not. The message names it and what it returned."""


def weights_of(name: str, weigh: Weigh, entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    """The weights that the strategy of that name gives.

    Raises:
        StrategyError: not one finite number of 0 or more for each entry, or all are 0, or their sum
            is not finite.
    """
    found = weigh(entries, wanted, knowledge)
    try:
        weights = finite_numbers(found, len(entries))
        if weights and (min(weights) < 0.0 or not 0.0 < sum(weights) / len(weights) < math.inf):
            raise ValueError(
                f"numbers from {min(weights)} to {max(weights)}, where none may be below 0, nor all 0, nor their sum infinite"
            )
    except ValueError as error:
        raise StrategyError(
            f"{STRATEGIES.described(name)} returned, as weights, {error}: correct its weigh, or change {STRATEGIES.setting}"
        ) from None
    return weights


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


def drawn(
    strategy: Strategy, entries: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random, knowledge: Knowledge
) -> list[PoolEntry]:
    """What the strategy draws.

    Raises:
        StrategyError: not `available(entries, wanted, cap)` different ones of `entries`, at most
            `cap` of one node.
    """
    found: Any = strategy.draw(entries, wanted, cap, rng, knowledge)
    if fault := _fault(found, entries, wanted, cap):
        raise StrategyError(
            f"{STRATEGIES.described(strategy.name)} returned {fault}: correct its draw, or change {STRATEGIES.setting}"
        )
    return list(found)


def _fault(found: Any, entries: Sequence[PoolEntry], wanted: int, cap: int) -> str:
    """What is wrong with a draw, of which nothing is taken for granted; empty if nothing is."""
    if not isinstance(found, (list, tuple)):
        return f"a {type(found).__name__} instead of a list of entries"
    offered = {entry.seq: entry for entry in entries}
    unknown = sum(not isinstance(each, PoolEntry) or offered.get(each.seq) != each for each in found)
    if unknown:
        return f"{unknown} of {len(found)} entries that it was not offered"
    if len({each.seq for each in found}) < len(found):
        return f"the same entry more than once, in {len(found)} entries"
    right = available(entries, wanted, cap)
    if len(found) != right:
        return f"{len(found)} entries where {right} must be drawn ({wanted} wanted, at most {cap} of one node)"
    node, most = max(Counter(each.node for each in found).items(), key=lambda item: item[1], default=("", 0))
    return f"{most} entries of node {node}, where one node may have {cap}" if most > cap else ""
