"""Checks an answer before one of reasoning-gym's scorers sees it.

Two kinds of scorer need this: those that pass the answer to sympy's parser, which is Python's
`eval` (there the task's own text is checked too, because a foreign configuration shapes it), and
those in which a short text causes unbounded work. Which ones these are was determined by testing
every scorer of reasoning-gym 0.1.25 with hostile answers.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Callable, Collection
from typing import Any

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


# Decides which texts may be passed to sympy's parser, which evaluates Python.
#
# A text passes only if Python's grammar reads it as arithmetic over numbers, known names and known
# functions of one argument, with powers small enough that no intermediate result explodes. Such a
# text contains no attribute, subscript, string or other call.


MAX_CHARS = 2000
MAX_POWER = 1000
MAX_NODES = 2000
MAX_DEPTH = 60

FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot"}
    | {"sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"}
)
CONSTANTS = frozenset({"pi", "E", "I"})

_CHARACTERS = re.compile(r"[A-Za-z0-9_+\-*/(). ]+")
_EXPONENT = re.compile(r"(?<![A-Za-z0-9_])[0-9.][0-9_.]*[eE]")
"""Numbers with an exponent, which sympy turns into exact rationals."""


def is_plain_expression(text: str, names: Collection[str], max_digits: int = 15) -> bool:
    """Check whether `text` is arithmetic over `names`, `CONSTANTS` and `FUNCTIONS` with bounded
    powers and numbers of `max_digits`.
    """
    if len(text) > MAX_CHARS or not _CHARACTERS.fullmatch(text) or _depth(text) > MAX_DEPTH:
        return False
    if _EXPONENT.search(text) or re.search(rf"[0-9_.]{{{max_digits + 1}}}", text):
        return False
    try:
        tree = ast.parse(text.strip(" "), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        return False
    try:
        return _is_plain(tree.body, frozenset(names), 1.0)
    except RecursionError:
        return False


def _is_plain(node: ast.expr, names: frozenset[str], power: float) -> bool:
    # `power` is the product of the exponents that apply to this node from outside.
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Name(id=name):
            return name in names or name in CONSTANTS
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _is_plain(operand, names, power)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            value = _constant(exponent)
            if value is None:
                # Symbolic exponents, as in E**(2*x), are allowed only outside of other powers.
                return power == 1.0 and isinstance(base, ast.Name | ast.Constant) and _is_plain(exponent, names, MAX_POWER)
            outer = power * max(1.0, abs(value))
            return outer <= MAX_POWER and _is_plain(base, names, outer)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _is_plain(left, names, power) and _is_plain(right, names, power)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return name in FUNCTIONS and _is_plain(argument, names, power)
    return False


def _constant(node: ast.expr) -> float | None:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _constant(operand)
            return None if inner is None else -inner
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _constant(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            top, bottom = _constant(left), _constant(right)
            return top / bottom if top is not None and bottom else None
    return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == ")":
            depth -= 1
    return deepest
