"""Many long answers: right ones after as much text as a border accepts, so that they dominate a
step in tokens and time.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.attacks.view import Hostile, answered, halves, nonsense, with_texts
from shared.contracts.messages import RolloutGroup
from shared.seeds import generator_from


def padded(view: Hostile) -> list[RolloutGroup]:
    """Groups of `completions` answers, each as long as a border accepts, `right_share` of them
    right.
    """
    return [_padded(view, group, rewards) for group, rewards in view.made]


def _padded(view: Hostile, group: RolloutGroup, rewards: Sequence[float]) -> RolloutGroup:
    right, wrong = halves(view.attack.completions or len(group.completions), view.attack.right_share)
    ends = [answered(view.answer(group.task.ref))] * right + [""] * wrong
    return with_texts(view, group, [_filled(view, end) for end in ends])


def _filled(view: Hostile, end: str) -> str:
    words = view.max_tokens
    while words and len(view.encode(_nonsense_before(view, words) + end)) > view.max_tokens:
        words -= 1
    return _nonsense_before(view, words) + end


def _nonsense_before(view: Hostile, words: int) -> str:
    """`words` words of nonsense; within a round the same number gives the same words."""
    return nonsense(generator_from(f"padding {view.number}"), words)
