"""The verifier `math`: the answer equals the reference answer symbolically, through the package math-verify (extra `math`).

math-verify finds LaTeX (`$...$`, `\\boxed{}`) or plain numbers in the text. A text without LaTeX and without words, like
`2*x**2 + sin(x)`, is read as one formula. Its own deadlines are off: they need signals, and the sandbox has a better one. Only
digits and operators can reach sympy's evaluating parser (through a regular expression); LaTeX has a grammar of its own.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from shared.tasks.derive import Item, TaskError
from shared.tasks.verifiers import AnswerScorer

MAX_CHARS = 1000
_EXPLOSION = re.compile(
    r"[0-9]{40}|[0-9.] *[eE] *[+-]? *[0-9]{3}|!"
    r"|(?:\^|\*\*)\s*[{(]*\s*-?\s*[0-9]{4}|(?:\^|\*\*)[^+\-*/]*(?:\^|\*\*)"
)
"""Long numbers, large decimal exponents, factorials, powers of four digits, powers of powers: short texts of unbounded work."""
_LATEX = re.compile(r"[$\\]")
_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "pi"})
_COMMAND = r"\\\g<0>"
_SQRT, _SQRT_LATEX = re.compile(r"\\sqrt\(([^()]*)\)"), r"\\sqrt{\1}"
_FINDERS = (LatexExtractionConfig(), ExprExtractionConfig())

logging.getLogger("math_verify").setLevel(logging.ERROR)


def verifier(item: Item) -> AnswerScorer:
    """1 for equal values, else 0.

    Raises:
        TaskError: the dataset's reference answer is not a formula.
    """
    reference = _parsed(item.task.answer or "")
    if not reference:
        raise TaskError(
            "task_verifier",
            f"{item.task.ref.dataset}: verifier math cannot read the reference answer {(item.task.answer or '')[:80]!r} as a "
            "formula; use reasoning_gym or exact",
        )
    return lambda answer: float(_equal(reference, _parsed(answer)))


def _equal(reference: list[Any], answer: list[Any]) -> bool:
    return bool(answer) and bool(verify(reference, answer, timeout_seconds=None))


def _parsed(text: str) -> list[Any]:
    text = text.strip()
    if not text or len(text) > MAX_CHARS or _EXPLOSION.search(text):
        return []
    if not _LATEX.search(text) and _FUNCTIONS.issuperset(_WORD.findall(text)):
        text = f"${_SQRT.sub(_SQRT_LATEX, _WORD.sub(_COMMAND, text)).replace('**', '^')}$"
    found: list[Any] = parse(text, _FINDERS, fallback_mode="no_fallback", parsing_timeout=None)
    return found
