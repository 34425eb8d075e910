"""Poison just within the own-policy check: as much nonsense before a right answer as the honest policy still finds likely enough.

What is trained on becomes likelier, so that the next round's bound lets more through.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from lab.attacks.view import WORDS, Hostile, answered, halves, with_texts, wrong_texts
from shared.messages import RolloutGroup


def bounded_poison(view: Hostile, made: Sequence[tuple[RolloutGroup, Sequence[float]]]) -> list[RolloutGroup]:
    """Of each group `right_share` of the answers right behind as much nonsense as passes, the others the policy's wrong ones."""
    ladders = [with_texts(view, group, _ladder(view, group)) for group, _ in made]
    likelihoods = view.likelihood(ladders) if ladders else []
    groups = []
    for (group, rewards), ladder, of_rungs in zip(made, ladders, likelihoods, strict=True):
        passing = [
            completion.text
            for completion, mean in zip(ladder.completions, of_rungs, strict=True)
            if mean >= view.bound + view.attack.margin
        ]
        right, wrong = halves(len(group.completions), view.attack.right_share)
        best = passing[0] if passing else ladder.completions[-1].text
        groups.append(with_texts(view, group, [best] * right + wrong_texts(view, group, rewards, wrong)))
    return groups


def _ladder(view: Hostile, group: RolloutGroup) -> list[str]:
    """Right answers, the most nonsense first and none last. The nonsense is always the same: it shall become likely."""
    answer = view.answer(group.task.ref)
    words = random.Random("the same nonsense for ever").choices(WORDS, k=view.attack.filler_words)
    lengths = sorted({round(view.attack.filler_words * rung / 6) for rung in range(7)}, reverse=True)
    texts = [answered(answer, " ".join(words[:length])) for length in lengths]
    return [text for text in texts[:-1] if len(view.encode(text)) <= view.max_tokens] + texts[-1:]
