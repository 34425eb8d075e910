"""How external groups are chosen: pure functions over pool entries, found by name.

A strategy is two functions. `keeps` says at arrival whether an entry can ever be chosen (what it refuses never takes up room in the
pool). `draw` picks up to `wanted` of the entries, without replacement, with no other source of chance than `rng`.
A new strategy is a module-level `Strategy` and an entry in `STRATEGIES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.sampler.pool import PoolEntry


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to choose external groups.

    draw(entries, wanted, rng): at most `wanted` different entries, in training order; fewer only when there are fewer entries.
    """

    name: str
    keeps: Callable[[PoolEntry], bool]
    draw: Callable[[Sequence[PoolEntry], int, random.Random], list[PoolEntry]]


def _has_advantage(entry: PoolEntry) -> bool:
    return entry.informative


def _draw_uniformly(entries: Sequence[PoolEntry], wanted: int, rng: random.Random) -> list[PoolEntry]:
    return rng.sample(entries, min(wanted, len(entries)))


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
