"""The default verifier: reasoning-gym's scorer for the dataset, or this project's, with the checks
of the dataset's `Form` before and after it.
"""

from __future__ import annotations

from typing import Any

from shared.tasks.derive import Item, TaskError
from shared.tasks.forms import NOT_WHOLE, PARTIAL_CEILING, form_of
from shared.tasks.guards import GUARDS
from shared.tasks.scorers import SCORERS
from shared.tasks.verifiers import AnswerScorer


def verifier(item: Item) -> AnswerScorer:
    """Score as reasoning-gym does, with full marks only for an answer that is right as a whole
    (`shared.tasks.forms`).

    Raises:
        TaskError: the task is a file's row, or its source has no scorer.
    """
    if item.dataset is None:
        raise TaskError("task_verifier", f"{item.task.ref.dataset}: a file has no scorer of its own; use exact, final_number, math")
    if not hasattr(item.dataset, "score_answer"):
        raise TaskError(
            "task_verifier", f"{item.task.ref.dataset} has no scorer of its own; use exact, final_number, math or your own verifier"
        )
    judge = _Judge(item)
    return judge.score if judge.is_plain else judge.guarded_score


class _Judge:
    # Methods instead of closures, because Python 3.11 calls the same function repeatedly faster
    # than a new one for each task.
    __slots__ = ("_entry", "_form", "_guard", "_scorer", "is_plain")

    def __init__(self, item: Item) -> None:
        dataset = item.task.ref.dataset
        self._entry = item.entry
        self._scorer = SCORERS.get(dataset) or item.dataset.score_answer
        self._form = form_of(dataset)
        self._guard = GUARDS.get(dataset)
        self.is_plain = self._guard is None and self._form.reads is None and not self._form.shrinks

    def score(self, answer: str) -> Any:
        reward = self._scorer(answer, self._entry)
        return reward if reward <= PARTIAL_CEILING else self._full_or_less(answer, reward)

    def guarded_score(self, answer: str) -> Any:
        entry, form = self._entry, self._form
        if self._guard is not None and not self._guard(answer, entry):
            return 0.0
        if form.reads is not None and not form.reads(answer, entry):
            return 0.0
        reward = self.score(answer)
        if form.shrinks and reward <= PARTIAL_CEILING and len(answer) > len(entry["answer"]):
            reward *= len(entry["answer"]) / len(answer)
        return reward

    def _full_or_less(self, answer: str, reward: Any) -> float:
        # Also reached for NaN, for which the comparison above is false.
        if answer == self._entry["answer"] or self._form.is_right(answer, self._entry):
            return 1.0
        return PARTIAL_CEILING if reward < 1.0 else NOT_WHOLE
