"""The default verifier: reasoning-gym's scorer for the dataset, or this project's, with the checks
of the dataset's `Form` before and after it.
"""

from __future__ import annotations

from typing import Any

from shared.tasks.derive import Item, TaskError
from shared.tasks.forms import NOT_WHOLE, PARTIAL_CEILING, form_of
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
    return _Judge(item).score


class _Judge:
    # A method instead of a closure, because Python 3.11 calls the same function repeatedly faster
    # than a new one for each task.
    __slots__ = ("_decides", "_entry", "_form", "_scorer")

    def __init__(self, item: Item) -> None:
        dataset = item.task.ref.dataset
        self._entry = item.entry
        self._decides = dataset in SCORERS
        self._scorer = SCORERS.get(dataset) or item.dataset.score_answer
        self._form = form_of(dataset)

    def score(self, answer: str) -> Any:
        entry, form = self._entry, self._form
        if form.reads is not None and not form.reads(answer, entry):
            return 0.0
        reward = self._scorer(answer, entry)
        if not reward <= PARTIAL_CEILING:  # also for NaN
            if self._decides or answer == entry["answer"] or form.is_right(answer, entry):
                return 1.0
            reward = PARTIAL_CEILING if reward < 1.0 else NOT_WHOLE
        if form.shrinks and len(answer) > len(entry["answer"]):
            reward *= len(entry["answer"]) / len(answer)
        return reward
