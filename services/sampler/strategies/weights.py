"""Holds a strategy's weights to what `Strategy.weigh` promises, because a batch that tells of an
infinite weight could not be read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
