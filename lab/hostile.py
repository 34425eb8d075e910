"""Groups that hostile nodes send: well-formed, of allowed tasks, and harmful. Chance is an argument.

Rewards never travel, so a lie about them is no attack. What is left is text: right answers wrapped in nonsense, which a verifier
calls right and training makes likelier (`wrong`); the same experience again and again (`duplicate`); so much of it that nothing
else is drawn (`flood`); and answers of a policy that is no good (`low_quality`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from lab.spec import Attack
from shared.messages import Completion, RolloutGroup

_WORDS = ("zq", "vx", "kw", "jj", "xh", "qp", "ww", "zz", "vk", "hx")


def poisoned(group: RolloutGroup, answer: str, attack: Attack, rng: random.Random) -> RolloutGroup:
    """The group with `right_share` of its answers right behind nonsense, the others nonsense alone; texts only."""
    count = len(group.completions)
    right = max(1, min(count - 1, round(attack.right_share * count)))
    completions = []
    for number in range(count):
        filler = " ".join(rng.choice(_WORDS) for _ in range(attack.filler_words))
        text = f"{filler}<answer>{answer}</answer>" if number < right else filler
        completions.append(Completion(text=text, finish_reason="stop", token_count=len(text)))
    return msgspec.structs.replace(group, completions=completions, prompt_ids=None)


def repeated(group: RolloutGroup, first: RolloutGroup, rng: random.Random) -> RolloutGroup:
    """The content of `first`, half the time byte for byte, else under this group's draw and time so that its id is new."""
    if rng.random() < 0.5:
        return first
    return msgspec.structs.replace(first, draw=group.draw, created_at=group.created_at)


def flooded(groups: Sequence[RolloutGroup], attack: Attack) -> list[RolloutGroup]:
    """Each group `flood_factor` times, every copy with an id of its own."""
    return [
        msgspec.structs.replace(group, draw=group.draw * attack.flood_factor + copy)
        for group in groups
        for copy in range(attack.flood_factor)
    ]
