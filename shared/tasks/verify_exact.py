"""The verifier `exact`: the answer equals the reference answer, ignoring case, spacing, and ways of
encoding the same character.
"""

from __future__ import annotations

import unicodedata

from shared.tasks.answers import bare
from shared.tasks.derive import Item, TaskError
from shared.tasks.verifiers import AnswerScorer

_KINDS = ("wide", "narrow", "noBreak", "compat", "initial", "medial", "final", "isolated", "small", "vertical")
_SAME_MEANING = tuple(f"<{kind}>" for kind in _KINDS)
"""Kinds of compatibility forms that are another look of the same text. The other kinds say
something else: `super` (10\u2076 is not 106), `sub`, `fraction`, `circle`, `square`, `font`.
"""


def verifier(item: Item) -> AnswerScorer:
    """1 for equal texts, else 0. Marks of a formula or of emphasis around the whole answer do not
    count.

    Raises:
        TaskError: the dataset has no reference answer.
    """
    reference = item.task.answer
    if reference is None:
        raise TaskError(
            "task_verifier",
            f"{item.task.ref.dataset}: verifier exact needs a reference answer, and this dataset gives none; use reasoning_gym",
        )
    wanted = {normalised(reference), normalised(bare(reference, formula=True))}
    return lambda answer: float(normalised(answer) in wanted or normalised(bare(answer)) in wanted)


def normalised(text: str) -> str:
    """`text` in lower case, with single spaces, each character in its usual form."""
    return " ".join(in_usual_characters(text).lower().split())


def in_usual_characters(text: str) -> str:
    """`text` without full-width digits, ligatures and other looks of usual characters."""
    return text if text.isascii() else unicodedata.normalize("NFC", "".join(map(_usual, text)))


def _usual(character: str) -> str:
    is_same = unicodedata.decomposition(character).startswith(_SAME_MEANING)
    return unicodedata.normalize("NFKC", character) if is_same else character
