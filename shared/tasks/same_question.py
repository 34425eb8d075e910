"""When two questions are the same for evaluation."""

from __future__ import annotations


def question_key(question: str) -> str:
    """Equal for questions that differ only in case and spacing. If one of them is held out, none is
    trained on, because the model would be asked what it has practised.
    """
    return " ".join(question.split()).casefold()
