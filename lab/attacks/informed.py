"""Attacks that know the defences: one party with many names, good behaviour first and poison later,
and a combination of the strongest attacks.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.attacks.bounded import bounded_poison
from lab.attacks.gamed import crumbs
from lab.attacks.view import Hostile, as_sampled, under_names
from shared.contracts.messages import RolloutGroup


def many_names(view: Hostile) -> list[RolloutGroup]:
    """Bounded poison: for each of the node's names as much as an honest node sends."""
    return under_names(view, bounded_poison(view, view.made))


def sleeper(view: Hostile) -> list[RolloutGroup]:
    """Honest groups until `start_round`, bounded poison from then on."""
    return as_sampled(view) if view.number < view.attack.start_round else bounded_poison(view, view.made)


def informed(view: Hostile) -> list[RolloutGroup]:
    """Honest until `start_round`. After that, for every name and each task, the most harmful text
    that passes the checks: partial credit if there is any, else bounded poison.

    Every group has a different task and different text, none is longer than an honest one, and no
    name sends more than an honest node, so quotas, digests and budgets detect nothing. Tokens and
    rewards are true.
    """
    if view.number < view.attack.start_round:
        return under_names(view, [group for group, _ in view.made])
    paid = [crumbs(view, group, rewards) for group, rewards in view.made]
    usable = _within_bound(view, paid)
    rest = bounded_poison(view, [each for each, found in zip(view.made, usable, strict=True) if found is None])
    left = iter(rest)
    return under_names(view, [next(left) if found is None else found for found in usable])


def _within_bound(view: Hostile, groups: Sequence[RolloutGroup | None]) -> list[RolloutGroup | None]:
    """Each group if all its answers pass the policy check, else None."""
    wanted = [group for group in groups if group is not None]
    passing = {
        id(group)
        for group, means in zip(wanted, view.likelihood(wanted) if wanted else [], strict=True)
        if min(means) >= view.bound + view.attack.margin
    }
    return [group if group is not None and id(group) in passing else None for group in groups]
