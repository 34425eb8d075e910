"""Limits newcomers to a part of a batch's foreign groups while established nodes have enough
groups. Pure; the random generator is an argument.

A newcomer is a share (`ScoredGroup.share`) with no group in the pool that was accepted while it was
established. Newcomers get whatever established nodes cannot fill, so that a young swarm, in which
every node is new, shares at full speed. A thousand new keys get no more of a batch than one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from services.sampler.draws import available, part_of
from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from services.sampler.strategies import Strategy
from services.sampler.strategies.contract import drawn


def newcomers_of(entries: Sequence[PoolEntry]) -> frozenset[str]:
    """The shares of which no entry was accepted from an established node."""
    return frozenset(entry.node for entry in entries) - {entry.node for entry in entries if entry.established}


def newcomers_most(established: Sequence[PoolEntry], wanted: int, cap: int, part: float) -> int:
    """How many of `wanted` may come from newcomers: `part` of them, rounded down but at least one,
    plus what established nodes cannot fill.
    """
    return max(1, part_of(wanted, part), wanted - available(established, wanted, cap))


def draw_with_newcomers(
    strategy: Strategy,
    entries: Sequence[PoolEntry],
    wanted: int,
    cap: int,
    part: float,
    rng: random.Random,
    knowledge: Knowledge,
) -> list[PoolEntry]:
    """Like `drawn`, with as many entries, at most `newcomers_most` of them from newcomers. Raises
    StrategyError as it does.
    """
    chosen = drawn(strategy, entries, wanted, cap, rng, knowledge)
    new = newcomers_of(entries)
    established = [entry for entry in entries if entry.node not in new]
    newcomers = [entry for entry in chosen if entry.node in new]
    most = newcomers_most(established, wanted, cap, part)
    if len(newcomers) <= most:
        return chosen
    return newcomers[:most] + drawn(strategy, established, wanted - most, cap, rng, knowledge)
