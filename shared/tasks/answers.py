"""Finds the answer in a completion."""

from __future__ import annotations

OPENING_TAG = "<answer>"
CLOSING_TAG = "</answer>"
"""A completion without this tag is an answer as a whole."""


def extract_answer(text: str) -> str:
    """The content of the last closed `<answer>...</answer>`, or the whole text if there is none,
    stripped.

    Takes time linear in the length of the text, even of hostile text, because it uses no regular
    expression.
    """
    end = text.rfind(CLOSING_TAG)
    if end < 0:
        return text.strip()
    previous_end = text.rfind(CLOSING_TAG, 0, end)
    start = text.find(OPENING_TAG, previous_end + 1 if previous_end >= 0 else 0, end)
    if start < 0:
        return text.strip()
    return text[start + len(OPENING_TAG) : end].strip()
