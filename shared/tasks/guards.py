"""Checks an answer before one of reasoning-gym's scorers sees it.

Two kinds of scorer need this: those that pass the answer to sympy's parser, which is Python's
`eval` (there the task's own text is checked too, because a foreign configuration shapes it), and
those in which a short text causes unbounded work. Which ones these are was determined by testing
every scorer of reasoning-gym 0.1.25 with hostile answers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

from shared.tasks.expressions import is_plain_expression

Guard = Callable[[str, dict[str, Any]], bool]
"""Whether the scorer may see this answer to this raw entry; if not, the reward is 0."""

_COMPLEX = re.compile(r"[0-9+\-.ijIJ() eE]{1,200}")
_HUGE_EXPONENT = re.compile(r"[eE][+-]?[0-9_]{4}")
_FOUR_DIGITS = re.compile(r"[0-9]{4}")
_SYMBOL = re.compile(r"[A-Za-z][A-Za-z0-9]{0,7}")
_CONSTANT_NAMES = frozenset(string.ascii_letters) | {"C0", "C1", "C_0", "C_1"}
"""Names that a model may use for the constant of integration."""
_SYMPY_NAMES = frozenset({"nan", "NaN", "oo", "zoo", "inf", "E", "I", "N", "O", "Q", "S", "pi", "beta", "gamma", "zeta", "lambda"})
"""Names that sympy's parser does not read as a variable; `nan` would equal every polynomial."""
MAX_COEFFICIENT_DIGITS = 60
"""Largest coefficient of a product of polynomials, in digits; the larger levels of reasoning-gym's
curriculum reach 25.
"""
_NUMBER_LIST = re.compile(r"[\[\]0-9eE+\-., '\"]*")


def _integral(answer: str, entry: dict[str, Any]) -> bool:
    names = {entry["metadata"]["variable"]} | _CONSTANT_NAMES
    return (
        _SYMBOL.fullmatch(entry["metadata"]["variable"]) is not None
        and is_plain_expression(entry["metadata"]["integrand"], names)
        and is_plain_expression(answer, names)
    )


def _polynomial(answer: str, entry: dict[str, Any]) -> bool:
    names = set(entry["metadata"]["variables"])
    return (
        names.isdisjoint(_SYMPY_NAMES)
        and all(_SYMBOL.fullmatch(name) for name in names)
        and is_plain_expression(entry["answer"], names, MAX_COEFFICIENT_DIGITS)
        and is_plain_expression(answer, names, MAX_COEFFICIENT_DIGITS)
    )


def _complex_number(answer: str, entry: dict[str, Any]) -> bool:
    # Excludes the letters of nan and inf, because a distance that is not a number would earn full
    # marks.
    return _COMPLEX.fullmatch(answer) is not None


def _fraction(answer: str, entry: dict[str, Any]) -> bool:
    return len(answer) <= 1000 and not _HUGE_EXPONENT.search(answer)


def _moves(answer: str, entry: dict[str, Any]) -> bool:
    return not _FOUR_DIGITS.search(answer)


def _number_list(answer: str, entry: dict[str, Any]) -> bool:
    # The scorer falls back to `eval` of the task's own answer if that is not JSON.
    return _NUMBER_LIST.fullmatch(entry["answer"]) is not None


GUARDS: dict[str, Guard] = {
    "simple_integration": _integral,
    "intermediate_integration": _integral,
    "polynomial_multiplication": _polynomial,
    "complex_arithmetic": _complex_number,
    "coin_flip": _fraction,
    "rubiks_cube": _moves,
    "rush_hour": _moves,
    "number_sorting": _number_list,
}
