"""How external groups are chosen: pure functions over pool entries, found by name. docs/sampling.md says when to use which.

A strategy is two functions. `keeps` says at arrival whether an entry can ever be chosen (what it refuses never takes up room in the
pool). `draw` picks up to `wanted` of the entries, without replacement, with no other source of chance than `rng`, and at most
`cap` of one node.
A new strategy is a module-level `Strategy` and an entry in `STRATEGIES`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.sampler.balanced import draw_balanced
from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from services.sampler.weighted import draw_weighted

_LAST = 2.0**-60
"""A weight that nobody will ever see chosen while there is an entry of weight 1."""

Weigh = Callable[[Sequence[PoolEntry], int, Knowledge], list[float]]
Draw = Callable[[Sequence[PoolEntry], int, int, random.Random, Knowledge], list[PoolEntry]]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to choose external groups.

    draw(entries, wanted, cap, rng, knowledge): `available(entries, wanted, cap)` different entries, in training order. `entries`
    stand in the order in which they came.
    weigh(entries, wanted, knowledge): their weights in the draw, above 0, on any scale; None where it knows no weights.
    prefers: the trainer, which has the model, keeps the likeliest (`near`) or least likely (`far`) of more candidates.
    """

    name: str
    keeps: Callable[[PoolEntry], bool]
    draw: Draw
    weigh: Weigh | None = None
    prefers: Literal["near", "far"] | None = None


def _has_advantage(entry: PoolEntry) -> bool:
    return entry.informative


def _draw_uniformly(
    entries: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random, knowledge: Knowledge
) -> list[PoolEntry]:
    """A uniform draw in which a node's groups beyond its cap are passed over."""
    chosen: list[PoolEntry] = []
    taken: Counter[str] = Counter()
    for entry in rng.sample(entries, len(entries) if cap < wanted else min(wanted, len(entries))):
        if len(chosen) < wanted and taken[entry.node] < cap:
            taken[entry.node] += 1
            chosen.append(entry)
    return chosen


def _weighted(name: str, weigh: Weigh) -> Strategy:
    def draw(entries: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random, knowledge: Knowledge) -> list[PoolEntry]:
        return draw_weighted(entries, weigh(entries, wanted, knowledge), wanted, cap, rng)

    return Strategy(name, keeps=_has_advantage, draw=draw, weigh=weigh)


def _learnability(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    """E[p(1 - p)] under Beta(1 + passes, 1 + failures): what the own policy's rewards on that source vary by.

    A source never seen has 1/6, more than one that is known to pass less than a fifth of the time: it is worth a try.
    """

    def of(source: str) -> float:
        own = knowledge.of_source(source)
        passes, failures = 1.0 + own.passes, 1.0 + max(0.0, own.completions - own.passes)
        return passes * failures / ((passes + failures) * (passes + failures + 1.0))

    by_source = {source: of(source) for source in {entry.source for entry in entries}}
    return [by_source[entry.source] for entry in entries]


def _spread(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    return [entry.reward_std for entry in entries]


def _rescue(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    """Groups with a success on a source that the own policy fails on come first, all alike; then the others, all alike.

    The success-gated sharing of Mutual RL (arXiv 2605.07244), by task source instead of by question. Where nothing is to be
    rescued all weights are the same, which is the uniform draw.
    """
    failing = {source for source in {entry.source for entry in entries} if knowledge.of_source(source).all_fail}
    return [1.0 if entry.has_pass and entry.source in failing else _LAST for entry in entries]


def _freshness(entries: Sequence[PoolEntry], wanted: int, knowledge: Knowledge) -> list[float]:
    """Half the weight for every J newer groups: a scale that needs no clock and fits a slow swarm as well as a fast one."""
    newest_first = sorted(range(len(entries)), key=lambda i: (-min(entries[i].created_at, entries[i].received_at), -entries[i].seq))
    weights = [0.0] * len(entries)
    for newer, index in enumerate(newest_first):
        weights[index] = max(_LAST, 2.0 ** (-newer / max(1, wanted)))
    return weights


def node_cap(wanted: int, max_share: float, nodes: int) -> int:
    """How many of `wanted` external groups may be one node's, when `nodes` other nodes are there.

    A share of `max_share`, rounded down, but never less than an equal part (rounded up): the cap shall keep one node from
    dominating, not leave places empty that nobody else may fill. With one other node there is no cap.
    """
    if nodes <= 1:
        return wanted
    return min(wanted, max(1, math.floor(wanted * max_share + 1e-9), math.ceil(wanted / nodes)))


def available(entries: Iterable[PoolEntry], wanted: int, cap: int) -> int:
    """How many entries a draw can give."""
    return min(wanted, sum(min(count, cap) for count in Counter(entry.node for entry in entries).values()))


def candidates(pool: int, wanted: int, oversample: float) -> int:
    """How many groups to draw where the trainer keeps `wanted` of them, from a pool of `pool`.

    `oversample` times as many, but what is drawn and not kept is gone: a batch's worth is left for the next one.
    """
    return max(wanted, min(math.ceil(wanted * oversample), pool - wanted))


UNIFORM = Strategy("uniform", keeps=_has_advantage, draw=_draw_uniformly)
"""The paper's (arXiv 2509.08721, section 3): groups without advantage are dropped, then J are drawn uniformly."""

LEARNABILITY = _weighted("learnability", _learnability)
SPREAD = _weighted("spread", _spread)
FRESHNESS = _weighted("freshness", _freshness)
RESCUE = _weighted("rescue", _rescue)
BALANCED = Strategy("balanced", keeps=_has_advantage, draw=draw_balanced)
LIKELIHOOD_NEAR = Strategy("likelihood_near", keeps=_has_advantage, draw=_draw_uniformly, prefers="near")
LIKELIHOOD_FAR = Strategy("likelihood_far", keeps=_has_advantage, draw=_draw_uniformly, prefers="far")

STRATEGIES = {
    strategy.name: strategy
    for strategy in (UNIFORM, LEARNABILITY, SPREAD, FRESHNESS, BALANCED, RESCUE, LIKELIHOOD_NEAR, LIKELIHOOD_FAR)
}


def strategy_named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: there is none of that name; the message lists those there are.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ValueError(f"strategy {name!r} is unknown: use one of {', '.join(sorted(STRATEGIES))}") from None


def local_order(entry: PoolEntry) -> tuple[int, int, int]:
    """Sort key of local groups: oldest policy first, which bounds staleness, then in the order in which tasks were drawn.

    The draw stands before the position because parallel scorers deliver in any order, and batches should not depend on that.
    """
    return (entry.policy_version, entry.draw, entry.seq)
