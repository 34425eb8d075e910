"""Repeats the same groups: byte for byte, with new ids, and with edits that change the digest."""

from __future__ import annotations

import random

import msgspec

from lab.attacks.view import Hostile, with_texts
from shared.contracts.messages import Completion, RolloutGroup


def duplicates(view: Hostile) -> list[RolloutGroup]:
    """Repeat the first group: half the time byte for byte, else with a new draw and time, so that
    its id is new.
    """
    if view.first is None:
        return []
    return [
        view.first if view.rng.random() < 0.5 else msgspec.structs.replace(view.first, draw=group.draw, created_at=group.created_at)
        for group, _ in view.made
    ]


def floods(view: Hostile) -> list[RolloutGroup]:
    """Each group `flood_factor` times, each copy with its own id."""
    return [
        msgspec.structs.replace(group, draw=group.draw * view.attack.flood_factor + copy)
        for group, _ in view.made
        for copy in range(view.attack.flood_factor)
    ]


def near_copies(view: Hostile) -> list[RolloutGroup]:
    """Each group of other nodes `flood_factor` times, with completions in another order, and with
    spaces and line ends that scorers ignore.

    A node sees only informative groups from others; if there are none yet, it repeats its local
    ones.
    """
    if not view.made:
        return []
    sources = list(view.overheard) or [group for group, _ in view.made]
    copies = []
    for group, _ in view.made:
        for copy in range(view.attack.flood_factor):
            source = view.rng.choice(sources)
            edited = with_texts(view, source, [_edited(each.text, view.rng) for each in _shuffled(source, view.rng)])
            draw = group.draw * view.attack.flood_factor + copy
            own = {"node": group.node, "draw": draw, "created_at": group.created_at}
            copies.append(msgspec.structs.replace(edited, **own))
    return copies


def _shuffled(group: RolloutGroup, rng: random.Random) -> list[Completion]:
    return rng.sample(group.completions, len(group.completions))


def _edited(text: str, rng: random.Random) -> str:
    return " " * rng.randrange(3) + text + rng.choice(("", " ", "\n", ".", " ok"))
