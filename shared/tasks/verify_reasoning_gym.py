"""The default verifier: reasoning-gym's scorer for the dataset, behind a guard, or a scorer of our own where that one is unsafe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.tasks.derive import Item
from shared.tasks.guards import GUARDS
from shared.tasks.scorers import SCORERS
from shared.tasks.verifiers import AnswerScorer


def verifier(item: Item) -> AnswerScorer:
    """Judge as reasoning-gym does."""
    entry, dataset = item.entry, item.task.ref.dataset
    scorer = SCORERS.get(dataset) or item.dataset.score_answer
    guard = GUARDS.get(dataset)
    if guard is None:
        return _Unguarded(scorer, entry).score
    return lambda answer: scorer(answer, entry) if guard(answer, entry) else 0.0


class _Unguarded:
    # A method and no closure: Python 3.11 calls the same function again and again faster than a new one for each task.
    __slots__ = ("_entry", "_scorer")

    def __init__(self, scorer: Callable[[str, dict[str, Any]], Any], entry: dict[str, Any]) -> None:
        self._scorer = scorer
        self._entry = entry

    def score(self, answer: str) -> Any:
        return self._scorer(answer, self._entry)
