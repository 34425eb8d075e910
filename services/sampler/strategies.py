"""How external groups are chosen: pure functions over pool entries, found by name.

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

from services.sampler.pool import PoolEntry


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to choose external groups.

    draw(entries, wanted, cap, rng): `available(entries, wanted, cap)` different entries, in training order.
    """

    name: str
    keeps: Callable[[PoolEntry], bool]
    draw: Callable[[Sequence[PoolEntry], int, int, random.Random], list[PoolEntry]]


def _has_advantage(entry: PoolEntry) -> bool:
    return entry.informative


def _draw_uniformly(entries: Sequence[PoolEntry], wanted: int, cap: int, rng: random.Random) -> list[PoolEntry]:
    """A uniform draw in which a node's groups beyond its cap are passed over."""
    chosen: list[PoolEntry] = []
    taken: Counter[str] = Counter()
    for entry in rng.sample(entries, len(entries) if cap < wanted else min(wanted, len(entries))):
        if len(chosen) < wanted and taken[entry.node] < cap:
            taken[entry.node] += 1
            chosen.append(entry)
    return chosen


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


UNIFORM = Strategy("uniform", keeps=_has_advantage, draw=_draw_uniformly)
"""The paper's (arXiv 2509.08721, section 3): groups without advantage are dropped, then J are drawn uniformly."""

STRATEGIES = {UNIFORM.name: UNIFORM}


def strategy_named(name: str) -> Strategy:
    """The strategy that the configuration names.

    Raises:
        ValueError: there is none of that name; the message lists those there are.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ValueError(f"sampler.strategy {name!r} is unknown: use one of {', '.join(sorted(STRATEGIES))}") from None


def local_order(entry: PoolEntry) -> tuple[int, int, int]:
    """Sort key of local groups: oldest policy first, which bounds staleness, then in the order in which tasks were drawn.

    The draw stands before the position because parallel scorers deliver in any order, and batches should not depend on that.
    """
    return (entry.policy_version, entry.draw, entry.seq)
