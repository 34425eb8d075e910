"""How foreign groups are chosen: pure functions over pool entries, a file each. docs/sampling.md
says when to use which.
"""

from __future__ import annotations

from typing import Any

from services.sampler.strategies.base import Strategy
from shared.registry import STRATEGIES

__all__ = ["Strategy", "strategy_named"]


def strategy_named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: there is none (the message lists those there are), it cannot be imported, or it
            is no `Strategy`.
    """
    found: Any = STRATEGIES.load(name)
    if not isinstance(found, Strategy):
        raise ValueError(f"strategy {name} is a {type(found).__name__}: its entry point must name a Strategy")
    return found
