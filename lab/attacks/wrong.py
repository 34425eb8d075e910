"""Right answers preceded by nonsense: a verifier accepts them, and training makes the nonsense more
likely.
"""

from __future__ import annotations

from lab.attacks.view import Hostile, answered, halves, nonsense, with_texts
from shared.contracts.messages import RolloutGroup


def wrong(view: Hostile) -> list[RolloutGroup]:
    """In each group `right_share` of the answers are nonsense followed by the right answer, and the
    others only nonsense. The texts have no token ids.
    """
    return [_poisoned(view, group) for group, _ in view.made]


def _poisoned(view: Hostile, group: RolloutGroup) -> RolloutGroup:
    count, answer = len(group.completions), view.answer(group.task.ref)
    right, _ = halves(count, view.attack.right_share)
    texts = []
    for number in range(count):
        filler = nonsense(view.rng, view.attack.filler_words)
        texts.append(answered(answer, filler) if number < right else filler)
    return with_texts(view, group, texts)
