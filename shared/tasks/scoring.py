"""Reward for an answer. Runs no text as code; may still take long on hostile text, so that foreign text goes to the sandbox."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from shared.messages import Task
from shared.tasks.answers import extract_answer
from shared.tasks.derive import derive_item
from shared.tasks.guards import GUARDS
from shared.tasks.scorers import SCORERS

MAX_ANSWER_CHARS = 65_536
"""Longest answer (after extraction) that is looked at; longer ones earn 0."""


def score_answer(task: Task, text: str) -> float:
    """Reward in [0, 1] for a completion's text.

    The answer is extracted (`extract_answer`) and scored against the task derived again from `task.ref`; the question, answer and
    metadata that `task` carries are not used. A scorer that raises, or returns what is not a number, counts as 0.

    Raises:
        TaskError: the reference does not derive.
    """
    dataset_name = task.ref.dataset
    item = derive_item(task.ref)
    answer = extract_answer(text)
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    try:
        guard = GUARDS.get(dataset_name)
        if guard is not None and not guard(answer, item.entry):
            return 0.0
        scorer = SCORERS.get(dataset_name)
        raw = scorer(answer, item.entry) if scorer else item.dataset.score_answer(answer=answer, entry=item.entry)
    except Exception:  # noqa: BLE001  # whatever a scorer raises on odd text is the answer's fault
        return 0.0
    return _reward(raw)


def _reward(raw: Any) -> float:
    if not isinstance(raw, Real):
        return 0.0
    value = float(raw)
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0
