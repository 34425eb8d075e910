"""Checks that an antiderivative contains nothing that its derivative would hide: one short
constant, and only functions of the integrand's kinds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

MAX_CONSTANT_DIGITS = 6
MAX_CONSTANT_NODES = 6
MAX_CONSTANT_POWER = 3
_NAMED = frozenset({"pi", "E", "I"})
_EXPONENTIALS = frozenset({"exp", "sinh", "cosh", "tanh"})
_CIRCULAR = frozenset({"sin", "cos", "tan", "cot", "sec", "csc"})


def is_one_antiderivative(answer: ast.expr, integrand: ast.expr, variable: str) -> bool:
    """Whether the answer has at most one letter besides the variable, as a term of its own; at most
    one numeric term, of few digits; and only functions of the integrand's kinds.

    `Abs` is allowed only in logarithms. Roots, logarithms and inverse functions are checked further
    by `Point.branched`.
    """
    free = [term for term in _terms(answer, variable) if variable not in _names(term)]
    letters = [name for name in _names(answer) if name != variable and name not in _NAMED and name not in _called(answer)]
    alone = [term for term in free if isinstance(term, ast.Name) and term.id not in _NAMED]
    numbers = [term for term in free if term not in alone]
    return (
        len(letters) == len(alone) <= 1
        and len(numbers) <= 1
        and all(_is_short(number) for number in numbers)
        and _kinds(answer) <= _kinds(integrand)
        and not _has_kink(answer)
    )


def _kinds(node: ast.expr) -> set[str]:
    called = _called(node)
    kinds = {"circular"} if called & _CIRCULAR else set()
    return kinds | {"exponential"} if called & _EXPONENTIALS or "E" in _names(node) else kinds


def varying_parts(answer: ast.expr, variable: str) -> Iterator[ast.expr]:
    """Every part of the answer that contains the variable, except absolute values, whose logarithms
    are included.
    """
    parts = (node for node in ast.walk(answer) if isinstance(node, ast.expr) and variable in _names(node))
    return (node for node in parts if not (isinstance(node, ast.Call) and "Abs" in _names(node.func)))


def _terms(node: ast.expr, variable: str) -> Iterator[ast.expr]:
    # Descend through factors that do not depend on the variable: `2*(x + 5)` has the terms of `x +
    # 5`.
    match node:
        case ast.UnaryOp(operand=inner):
            yield from _terms(inner, variable)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            yield from _terms(left, variable)
            yield from _terms(right, variable)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right) if variable in _names(left) and variable not in _names(
            right
        ):
            yield from _terms(left, variable)
        case ast.BinOp(left=left, op=ast.Mult(), right=right) if variable in _names(right) and variable not in _names(left):
            yield from _terms(right, variable)
        case _:
            yield node


def _names(node: ast.expr) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def _called(node: ast.expr) -> set[str]:
    return {inner.func.id for inner in ast.walk(node) if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)}


def _is_short(term: ast.expr) -> bool:
    nodes = [node for node in ast.walk(term) if isinstance(node, ast.expr)]
    digits = sum(len(repr(node.value)) for node in nodes if isinstance(node, ast.Constant))
    powers = [node.right for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)]
    is_moderate = all(isinstance(power, ast.Constant) and power.value <= MAX_CONSTANT_POWER for power in powers)  # type: ignore[operator]
    is_moderate = is_moderate and not _called(term) & _EXPONENTIALS
    return is_moderate and len(nodes) <= MAX_CONSTANT_NODES and digits <= MAX_CONSTANT_DIGITS


def _has_kink(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("log", "ln"):
            return False
        if node.func.id == "Abs":
            return True
    return any(_has_kink(inner) for inner in ast.iter_child_nodes(node))
