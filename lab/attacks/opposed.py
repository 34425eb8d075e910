"""Groups that undo what honest groups teach, although all their answers are scored correctly and
are likely.

The right answer appears among the wrong ones with a suffix that makes it wrong, so that training
makes each of its tokens less likely. The rewarded answers are the least likely ones that pass the
policy check.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.attacks.informed import bounded_poison
from lab.attacks.view import Hostile, answered, as_sampled, halves, under_names, with_texts
from shared.contracts.messages import RolloutGroup
from shared.tasks.evaluation import PASS_REWARD

_MORE = ("0", "1", "5", "7", "9", " 0", " 1", ".5", " x", "a", ")", "\n0 0 0")
"""Suffixes that make a right answer wrong: one token or a few."""
_SECOND = ("", "0", "7", "a")
"""A second answer after the right one, which then does not count, because only the last answer
does.
"""


def opposed(view: Hostile) -> list[RolloutGroup]:
    """Honest groups until `start_round`, then opposed ones; for each name as many as an honest node
    sends.
    """
    if view.number < view.attack.start_round:
        return under_names(view, as_sampled(view))
    poisoned = bounded_poison(view, view.made)
    undone = _undone(view, [group for group, _ in view.made])
    groups = []
    for group, wrong in zip(poisoned, undone, strict=True):
        right_count, wrong_count = halves(len(group.completions), view.attack.right_share)
        right = [completion.text for completion in group.completions[:right_count]]
        rest = [completion.text for completion in group.completions[right_count:]]
        groups.append(with_texts(view, group, right + ([wrong] * wrong_count if wrong is not None else rest)))
    return under_names(view, groups)


def _undone(view: Hostile, groups: Sequence[RolloutGroup]) -> list[str | None]:
    """For each group, the likeliest wrong answer that begins with the right one; None if none
    passes the check.
    """
    tailed = [with_texts(view, group, _tailed(view, group)) for group in groups]
    found: list[str | None] = []
    for group, likelihoods in zip(tailed, view.likelihood(tailed) if tailed else [], strict=True):
        texts = [completion.text for completion in group.completions]
        paid = view.score(group.task.ref, texts)
        wrong = [
            (likelihood, text) for text, likelihood, reward in zip(texts, likelihoods, paid, strict=True) if reward < PASS_REWARD
        ]
        best = max(wrong, default=None)
        found.append(best[1] if best is not None and best[0] >= view.bound + view.attack.margin else None)
    return found


def _tailed(view: Hostile, group: RolloutGroup) -> list[str]:
    answer = view.answer(group.task.ref)
    after = [written + more for more in _MORE for written in (answer, answered(answer))]
    inside = [answered(answer + more) for more in _MORE]
    texts = [*after, *inside, *(answered(answer) + answered(second) for second in _SECOND)]
    return [text for text in texts if len(view.encode(text)) <= view.max_tokens] or [answer]
