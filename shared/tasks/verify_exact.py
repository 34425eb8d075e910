"""The verifier `exact`: the answer equals the reference answer, ignoring case, spacing, and ways of
encoding the same character.
"""

from __future__ import annotations

import re
import unicodedata

from shared.tasks.answers import bare
from shared.tasks.derive import Item, TaskError
from shared.tasks.verifiers import AnswerScorer

_KINDS = ("wide", "narrow", "noBreak", "compat", "initial", "medial", "final", "isolated", "small", "vertical")
_STRAIGHT = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2010: "-", 0x2011: "-", 0x2212: "-"}
_CHOICE = re.compile(r"\(?([A-Za-z])\)")
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")
"""Left in a reference by the program that wrote it; no model answers with them."""
_SAME_MEANING = tuple(f"<{kind}>" for kind in _KINDS)
"""Kinds of compatibility forms that are another look of the same text. The other kinds say
something else: `super` (10\u2076 is not 106), `sub`, `fraction`, `circle`, `square`, `font`.
"""


def verifier(item: Item) -> AnswerScorer:
    """1 for equal texts, else 0. Marks of a formula or of emphasis around the whole, a full stop at
    its end, and the brackets of a choice such as `(B)` or `B)` do not count.

    Raises:
        TaskError: the dataset has no reference answer.
    """
    reference = item.task.answer
    if reference is None:
        raise TaskError(
            "task_verifier",
            f"{item.task.ref.dataset}: verifier exact needs a reference answer, and this dataset gives none; use reasoning_gym",
        )
    wanted = {normalised(reference), _unmarked(_INVISIBLE.sub("", reference)) or normalised(reference)}
    return lambda answer: float(normalised(answer) in wanted or _unmarked(answer) in wanted)


def _unmarked(text: str) -> str:
    text = bare(bare(text).removesuffix("."))
    return normalised(_CHOICE.sub(r"\1", text) if len(text) <= 3 else text)


def normalised(text: str) -> str:
    """`text` in lower case, with single spaces and straight quotation marks, each character in its
    usual form.
    """
    return " ".join(in_usual_characters(text).translate(_STRAIGHT).lower().split())


def in_usual_characters(text: str) -> str:
    """`text` without full-width digits, ligatures and other looks of usual characters."""
    return text if text.isascii() else unicodedata.normalize("NFC", "".join(map(_usual, text)))


def _usual(character: str) -> str:
    is_same = unicodedata.decomposition(character).startswith(_SAME_MEANING)
    return unicodedata.normalize("NFKC", character) if is_same else character
