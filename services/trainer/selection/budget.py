"""Limits the cost of foreign groups in one step. Pure arithmetic over token positions; the same
batch gives the same result.

A foreign group may cost `factor` times the usual group of its batch. All groups of one sender
together may cost the usual for that many groups, plus `factor - 1` times the usual: one group's
excess, however many groups there are. A group over its budget is left out completely.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

GROUP_BUDGET = "group_budget"
SENDER_BUDGET = "sender_budget"


@dataclass(frozen=True, slots=True)
class Cost:
    """Positions that a forward pass computes for one group, with its prompt once per completion."""

    node: str
    is_local: bool
    positions: int


def usual_cost(costs: Sequence[Cost], usual_tokens: int) -> float:
    """The usual cost of a group: the completions of the largest possible local group, or more if
    this batch's costliest local group or its median group costs more.
    """
    if not costs:
        return float(usual_tokens)
    local = [cost.positions for cost in costs if cost.is_local]
    return float(max(usual_tokens, *local, statistics.median_low([cost.positions for cost in costs])))


def over_budget(costs: Sequence[Cost], usual_tokens: int, factor: float) -> dict[int, str]:
    """Indexes of the foreign groups to leave out, with the reason: GROUP_BUDGET, or SENDER_BUDGET
    for a sender's costliest ones.

    Example: with 100 usual and a factor of 4, `[401, 300, 200]` of one sender loses its first group
    to the group's budget; the rest, 500, is what two groups may cost together.
    """
    usual = usual_cost(costs, usual_tokens)
    left_out = {index: GROUP_BUDGET for index, cost in enumerate(costs) if not cost.is_local and cost.positions > factor * usual}
    by_node: dict[str, list[int]] = {}
    for index, cost in enumerate(costs):
        if not cost.is_local and index not in left_out:
            by_node.setdefault(cost.node, []).append(index)
    for indices in by_node.values():
        cheapest_last = sorted(indices, key=lambda index: (-costs[index].positions, index))
        while sum(costs[index].positions for index in cheapest_last) > (len(cheapest_last) + factor - 1.0) * usual:
            left_out[cheapest_last.pop(0)] = SENDER_BUDGET
    return left_out
