"""Rewards a right answer in few words: text around the reference answer lowers the reward, and an
answer of more than a few words earns nothing.

[[tasks]]
dataset = "gcd"
verifier = "brief"
pass_at = 1
"""

from __future__ import annotations

import re

from shared.tasks.derive import Item, TaskError
from shared.tasks.verifiers import AnswerScorer

MOST_WORDS = 6


def brief(item: Item) -> AnswerScorer:
    """The scorer of one task's answers. Raises TaskError if the task has no reference answer."""
    wanted = item.task.answer
    if wanted is None:
        raise TaskError("task_verifier", f"{item.task.ref.dataset} gives no reference answer, which verifier brief needs")

    def score(answer: str) -> float:
        words = re.findall(r"\S+", answer[:200])
        if len(words) > MOST_WORDS or words[-1:] != wanted.split()[-1:]:
            return 0.0
        return 1.0 if answer.strip() == wanted else 0.5

    return score
