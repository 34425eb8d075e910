"""Strategies for choosing foreign groups: pure functions over pool entries, one file each.
docs/sampling.md says when to use which.
"""

from __future__ import annotations

from typing import Any

from services.sampler.strategies.base import Strategy
from shared.registry import STRATEGIES

__all__ = ["Strategy", "strategy_named"]


def strategy_named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: there is none (the message lists the known names), it cannot be imported, or it
            is not a `Strategy` with functions to keep and to draw.
    """
    found: Any = STRATEGIES.load(name)
    if not isinstance(found, Strategy):
        raise ValueError(f"{STRATEGIES.described(name)} is a {type(found).__name__}: its entry point must name a Strategy")
    functions = {"keeps": found.keeps, "draw": found.draw, **({} if found.weigh is None else {"weigh": found.weigh})}
    if wrong := [f"{part} is a {type(each).__name__}" for part, each in functions.items() if not callable(each)]:
        raise ValueError(
            f"{STRATEGIES.described(name)}: its {' and its '.join(wrong)}: give functions there, or change {STRATEGIES.setting}"
        )
    return found
