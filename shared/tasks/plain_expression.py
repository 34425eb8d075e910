"""Decides which texts may be passed to sympy's parser, which evaluates Python.

A text passes only if Python's grammar reads it as arithmetic over numbers, known names and known
functions of one argument, with powers small enough that no intermediate result explodes. Such a
text contains no attribute, subscript, string or other call. The task's own text is checked too,
because a foreign configuration shapes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

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
