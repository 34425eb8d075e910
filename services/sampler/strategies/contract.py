"""Holds a strategy's draws to what `Strategy.draw` promises, because a batch of other groups than
were asked for would be trained on without a word.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from services.sampler.draws import available
from services.sampler.knowledge import Knowledge
from services.sampler.pool import PoolEntry
from services.sampler.strategies.base import Strategy
from services.sampler.strategies.weights import StrategyError
from shared.registry import STRATEGIES


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
