r"""The verifier `math`: the answer equals the reference answer symbolically, through the package
math-verify (extra `math`).

The whole answer must be one formula (`whole_formula`), in LaTeX (`$...$`, `\boxed{}`) or plain like
`2*x**2 + sin(x)`; math-verify itself would find a formula anywhere in a text. Formulas are compared
by their values (`formula_values`), because a symbolic comparison of ordinary wrong answers takes
seconds and math-verify rounds numbers. What has no value (sets, intervals) is left to math-verify.
Its own deadlines are turned off: they need signals, and the sandbox has a better one. Only digits
and operators can reach sympy's evaluating parser (through a regular expression); LaTeX has a
grammar of its own.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from shared.tasks.derive import Item, TaskError
from shared.tasks.formula_sizes import is_seen_as_a_whole
from shared.tasks.formula_values import DIGITS, exact_value, same_values
from shared.tasks.numerals import read_number, rounds_from
from shared.tasks.verifiers import AnswerScorer
from shared.tasks.whole_formula import FUNCTIONS, is_one_formula, is_small, unwrapped

MAX_SYMBOLIC_CHARS = 300
"""Longest answer that math-verify compares. A longer one must agree at points."""
ROUNDED_PLACES = 6
"""A rounded number with at least this many decimal places counts as equal to the reference."""
MAX_NUMBER_CHARS = 40

_LATEX = re.compile(r"[$\\]")
_WORD = re.compile(r"[A-Za-z]{2,}")
_COMMAND = r"\\\g<0>"
_SQRT, _SQRT_LATEX = re.compile(r"\\sqrt\(([^()]*)\)"), r"\\sqrt{\1}"
_POWER = re.compile(r"\^\s*(-?[0-9]+)")
_PERCENT = re.compile(r"(.*?)\s*\\?%", re.DOTALL)
_FINDERS = (LatexExtractionConfig(), ExprExtractionConfig())

logging.getLogger("math_verify").setLevel(logging.ERROR)


def verifier(item: Item) -> AnswerScorer:
    """1 for equal values, else 0.

    Raises:
        TaskError: the dataset's reference answer is not a formula.
    """
    text = item.task.answer or ""
    plain, is_percent = _without_percent(unwrapped(text))
    value = read_number(plain)
    reference = sympy.Rational(*value.as_integer_ratio()) if value is not None and not is_percent else _parsed(plain, is_percent)
    if reference is None:
        raise TaskError(
            "task_verifier",
            f"{item.task.ref.dataset}: verifier math cannot read the reference answer {text[:80]!r} as a "
            "formula; use reasoning_gym or exact",
        )
    return lambda answer: float(_is_equal(reference, plain, answer))


def _is_equal(reference: Any, plain: str, answer: str) -> bool:
    """Numbers are compared exactly, formulas by their values at points. Only what neither decides
    goes to `math_verify`, which is slow and can be tricked into equalities. An answer must be one
    formula as a whole; with two formulas, one of them could always be right.
    """
    inner = unwrapped(answer)
    number = read_number(inner)
    if number is not None:
        exact = _number(reference)
        return exact is not None and len(inner) <= MAX_NUMBER_CHARS and rounds_from(inner, exact, ROUNDED_PLACES)
    formula, answer_is_percent = _without_percent(inner)
    if not is_one_formula(formula, plain):
        return False
    given = _parsed(formula, answer_is_percent)
    if given is None or isinstance(given, sympy.Expr) != isinstance(reference, sympy.Expr):
        return False
    if isinstance(given, sympy.Expr):
        same = same_values(reference, given, f"{plain}={answer}")
        if same is not None:
            return same
    elif not is_seen_as_a_whole(given, reference, {}):
        return False
    return len(answer) <= MAX_SYMBOLIC_CHARS and bool(verify([reference], [given], float_rounding=15, timeout_seconds=None))


def _number(reference: Any) -> Fraction | None:
    # Exact if it is rational, else to more digits than an answer may have.
    if not isinstance(reference, sympy.Expr) or reference.free_symbols:
        return None
    with suppress(ZeroDivisionError):
        exact = exact_value(reference, {})
        if exact is not None:
            return exact
    value = reference.evalf(DIGITS)
    return Fraction(str(value)) if value.is_Float and value.is_finite else None


def _without_percent(text: str) -> tuple[str, bool]:
    match = _PERCENT.fullmatch(text)
    return (match[1], True) if match else (text, False)


def _parsed(text: str, is_percent: bool = False) -> Any:
    # A formula, set, interval, ... as a sympy object, or None.
    if not is_small(text):
        return None
    if not _LATEX.search(text) and FUNCTIONS.issuperset(_WORD.findall(text)):
        text = _SQRT.sub(_SQRT_LATEX, _WORD.sub(_COMMAND, text)).replace("**", "^")
    text = _POWER.sub(r"^{\1}", text)
    if "$" not in text:
        text = f"${text}$"
    found: list[Any] = parse(text, _FINDERS, fallback_mode="no_fallback", parsing_timeout=None)
    if not found or isinstance(found[0], str):
        return None
    return found[0] / 100 if is_percent and isinstance(found[0], sympy.Expr) else found[0]
