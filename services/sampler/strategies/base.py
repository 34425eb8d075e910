"""The interface of a strategy, the arithmetic of a draw, and what holds draws and weights to their
promise.

A batch of other groups than were asked for would be trained on without a word, and a batch that
tells of an infinite weight could not be read again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.sampler.pool import Knowledge, PoolEntry
from shared.registry import STRATEGIES, finite_numbers
from shared.runtime.exits import FatalError

# The arithmetic of a draw: how many groups one node may have, and how entries are taken in a
# given order. Pure.

_TINY = 5e-324


def part_of(wanted: int, part: float) -> int:
    """The fraction `part` of `wanted`, rounded down without binary rounding errors: 0.3 of 10 is
    3.
    """
    return math.floor(wanted * part + 1e-9)


def node_cap(wanted: int, max_share: float, nodes: int) -> int:
    """Return how many of `wanted` foreign groups may come from one node if there are `nodes` other
    nodes.

    A share of `max_share`, rounded down, but never less than an equal part (rounded up): the cap
    keeps one node from dominating, and must not leave places empty that no other node may fill.
    With one other node there is no cap.
    """
    if nodes <= 1:
        return wanted
    return min(wanted, max(1, part_of(wanted, max_share), math.ceil(wanted / nodes)))


def available(entries: Iterable[PoolEntry], wanted: int, cap: int) -> int:
    """Return how many entries a draw can give."""
    return min(wanted, sum(min(count, cap) for count in Counter(entry.node for entry in entries).values()))


def candidates(pool: int, wanted: int, oversample: float) -> int:
    """Return how many groups to draw from a pool of `pool` groups if the trainer keeps `wanted` of
    them.

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


LAST = 2.0**-60
"""A weight so small that its entry is practically never chosen while one of weight 1 is left."""

Draw = Callable[[Sequence[PoolEntry], int, int, random.Random, Knowledge], list[PoolEntry]]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to choose foreign groups, as registered in the entry-point group `swarm.strategies`.

    keeps(entry): at arrival, whether it can ever be chosen; other entries take no room in the pool.
    draw(entries, wanted, cap, rng, knowledge): `available(entries, wanted, cap)` different entries,
    in training order, at most `cap` of one node, with `rng` as the only source of randomness; a
    draw that returns anything else ends the sampler. It may be called twice for a batch, with fewer
    entries, as newcomers have places of their own (`sampler.newcomer_share`).
    `entries` are in order of arrival. weigh(entries, wanted, knowledge): their weights in the draw,
    0 or more, on any scale (`weights_of`); None for a strategy without weights.
    """

    name: str
    keeps: Callable[[PoolEntry], bool]
    draw: Draw
    weigh: Weigh | None = None


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
    """Return what the strategy draws.

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
    """Describe what is wrong with a draw, of which nothing is taken for granted; empty if nothing
    is.
    """
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
