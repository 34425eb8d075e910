"""The verifier `exact`: the answer equals the reference answer, ignoring case, spacing and Unicode
compatibility forms.
"""

from __future__ import annotations

import unicodedata

from shared.tasks.derive import Item, TaskError
from shared.tasks.verifiers import AnswerScorer


def verifier(item: Item) -> AnswerScorer:
    """1 for equal texts, else 0.

    Raises:
        TaskError: the dataset has no reference answer.
    """
    reference = item.task.answer
    if reference is None:
        raise TaskError(
            "task_verifier",
            f"{item.task.ref.dataset}: verifier exact needs a reference answer, and this dataset gives none; use reasoning_gym",
        )
    wanted = normalised(reference)
    return lambda answer: float(normalised(answer) == wanted)


def normalised(text: str) -> str:
    """`text` in NFKC, without case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
