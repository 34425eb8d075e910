"""Chooses which of its local groups a node trains on: the controls for question 2. Pure; randomness
is an argument.

In the paper a node trains on all I local groups as drawn. These rules filter local groups the way
the pool filters foreign ones, so that the effect of filtering can be separated from the effect of
sharing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from lab.spec import LocalRule

G = TypeVar("G")


def groups_to_make(rule: LocalRule, local: int, made: Sequence[bool]) -> int:
    """How many more local groups to make this round. `made[i]` says whether group i, already made,
    is informative.

    With informative_until at most I at a time, until I - unfiltered of those after the first
    `unfiltered` are informative, or `max_groups` are made.
    """
    if rule.filter == "none":
        return local - len(made)
    if rule.filter == "informative_of_pool":
        return rule.unfiltered + rule.pool - len(made)
    if not made:
        return min(local, rule.max_groups)
    missing = (local - rule.unfiltered) - sum(made[rule.unfiltered :])
    return max(0, min(missing, local, rule.max_groups - len(made)))


def local_part(rule: LocalRule, groups: Sequence[G], informative: Sequence[bool], local: int, rng: random.Random) -> list[G]:
    """The at most `local` groups to train on: the first `unfiltered`, then informative ones, then
    others if there are too few.
    """
    if rule.filter == "none":
        return list(groups)
    first, rest = list(groups[: rule.unfiltered]), list(range(rule.unfiltered, len(groups)))
    if rule.filter == "informative_of_pool":
        rng.shuffle(rest)
    rest.sort(key=lambda index: not informative[index])
    return [*first, *(groups[index] for index in sorted(rest[: local - len(first)]))]


def groups_to_reuse(rule: LocalRule, earlier: Sequence[tuple[int, G]], round_number: int, rng: random.Random) -> list[G]:
    """Up to `reuse` of the informative `earlier` groups that are no older than `reuse_rounds`. Each
    comes with the round that made it.
    """
    usable = [group for made, group in earlier if made < round_number <= made + rule.reuse_rounds]
    return rng.sample(usable, min(rule.reuse, len(usable)))
