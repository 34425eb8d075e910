"""Gamed scorers: answers that earn a reward without being right, mostly partial credit.

A group's advantages depend on which of its answers earned more, not on whether any is right. If no
answer is right, one that earns a little partial credit is reinforced as strongly as a right one
would be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lab.attacks.view import Hostile, answered, halves, with_texts, wrong_texts
from shared.contracts.messages import RolloutGroup

_PREMISE = re.compile(r"^\.?\s*\d+\.\s+(.+)$", re.MULTILINE)
_CONSTANTS = ("x", "0", "7", "[7]", "a -> a", "True", "nan")


def gamed(view: Hostile) -> list[RolloutGroup]:
    """For each task a group that exploits the scorer; the sampled group if the scorer rewards
    nothing wrong.
    """
    groups = []
    for group, rewards in view.made:
        found = crumbs(view, group, rewards)
        groups.append(group if found is None else found)
    return groups


def crumbs(view: Hostile, group: RolloutGroup, rewards: Sequence[float]) -> RolloutGroup | None:
    """`right_share` of the answers are the wrong answer with the highest reward, and the others
    earn less; None if no wrong answer earns more than others.
    """
    wrong = wrong_answers(view.answer(group.task.ref), group.task.question)
    candidates = [written for answer in wrong for written in (answer, answered(answer))]
    paid = view.score(group.task.ref, candidates)
    best = max(range(len(candidates)), key=lambda place: paid[place])
    least = [*wrong_texts(view, group, rewards, 1), answered("")]
    unpaid = view.score(group.task.ref, least)
    if paid[best] <= min(unpaid):
        return None
    many, few = halves(len(group.completions), view.attack.right_share)
    return with_texts(view, group, [candidates[best]] * many + [least[unpaid.index(min(unpaid))]] * few)


def wrong_answers(answer: str, question: str) -> list[str]:
    """Wrong answers for any task: close to the right one, copied from the question, or the same for
    all questions.
    """
    near = [f"{answer}7", f"{answer} 7", f"7{answer}"]
    copied = [premise for premise in _PREMISE.findall(question) if premise != answer]
    return [*near, *copied[:4], *(constant for constant in _CONSTANTS if constant != answer)]
