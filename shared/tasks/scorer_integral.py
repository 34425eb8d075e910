"""The scorer of the two integration datasets: it differentiates the answer and compares values.

reasoning-gym passes answers to sympy's parser (Python's `eval`) and asks `simplify` whether a
difference is zero, which takes seconds for an ordinary wrong answer and never ends for some. Here
the derivative is compared with the integrand at real points, and the answer's distance from the
reference must be the same at all of them: a step function has slope 0 everywhere.

A derivative hides constants, and terms too flat to be seen. An answer of this node's own policy has
no reason to carry any, so these datasets are scored locally only (`SCORED_LOCALLY`): groups of
other nodes are not taken.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]

from shared.seeds import number_from
from shared.tasks.formula_reading import is_about_as_long
from shared.tasks.formula_values import is_seen_as_a_whole, is_tame

DIGITS = 40
TOLERANCE = sympy.Float(10, DIGITS) ** -25
MAX_NODES = 400
MIN_POINTS = 6
"""Number of points, where the integrand is real, that must agree."""
RANGES = (
    *((0.5, 1.5), (-1.5, -0.5), (0.0, 0.33), (-0.33, 0.0), (0.0, 1.0), (-1.0, 0.0)),
    *((0.5, 4.0), (-4.0, -0.5), (3.0, 20.0), (-20.0, -3.0), (8.0, 20.0), (-20.0, -8.0)),
)
"""One point in each, then a second and a third until `MIN_POINTS` were in the domain."""

_FUNCTIONS = {"sqrt": sympy.sqrt, "ln": sympy.log, "Abs": sympy.Abs} | {
    name: getattr(sympy, name)
    for name in ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh")
    + ("asinh", "acosh", "atanh", "exp", "log")
}
_NAMED = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda one, other: one + other,
    ast.Sub: lambda one, other: one - other,
    ast.Mult: lambda one, other: one * other,
    ast.Div: lambda one, other: one / other,
    ast.Pow: lambda one, other: one**other,
}


def integral(answer: str, entry: dict[str, Any]) -> float:
    """1 if the answer is an antiderivative of the integrand, with at most one other letter as the
    constant, else 0. The answer must have passed `is_plain_expression`.
    """
    name, integrand, oracle = entry["metadata"]["variable"], entry["metadata"]["integrand"], entry["answer"]
    is_solved = "Integral(" not in oracle
    if answer == oracle and is_solved:
        return 1.0
    if not is_about_as_long(answer, max(oracle, integrand, key=len)):
        return 0.0
    variable = sympy.Symbol(name, real=True)
    wanted, given = _read_once(integrand), _read(answer)
    constants = given.free_symbols - {variable}
    if len(constants) > 1 or not is_tame(given) or any(abs(given.coeff(letter)) != 1 for letter in constants):
        return 0.0
    given = given.subs(dict.fromkeys(constants, 0))
    reference = _read_once(oracle) if is_solved else given
    reference = reference.subs(dict.fromkeys(reference.free_symbols - {variable}, 0))
    if _has_kink(given) and not _has_kink(reference):
        return 0.0
    slope, agreed, distance = sympy.diff(given, variable), 0, None
    for place, point in enumerate(_points(f"{name}:{integrand}:{answer}")):
        if agreed >= MIN_POINTS and place % len(RANGES) == 0:
            break
        right, found, apart = (each.evalf(DIGITS, subs={variable: point}) for each in (wanted, slope, given - reference))
        if not (right.is_real and right.is_finite):
            continue
        if not found.is_number or abs(found - right) > (1 + abs(right)) * TOLERANCE:
            return 0.0
        if not agreed and not is_seen_as_a_whole(slope, wanted, {variable: point}):
            return 0.0
        if apart.is_real:
            distance = apart if distance is None else distance
            if abs(apart - distance) > (1 + abs(right) + abs(distance)) * TOLERANCE:
                return 0.0
        agreed += 1
    return float(agreed >= MIN_POINTS)


def _has_kink(formula: Any) -> bool:
    """Check whether an absolute value stands outside of logarithms: the kink may be beyond all
    points. sympy writes `sqrt((x-5)**2)` so too.
    """
    if isinstance(formula, sympy.Abs):
        return True
    return not isinstance(formula, sympy.log) and any(map(_has_kink, formula.args))


def _points(seed: str) -> Iterator[Any]:
    for turn in range(3):
        for low, high in RANGES:
            part = sympy.Rational(number_from(f"{turn}:{low}:{seed}", 6) + 1, 2**48 + 2)
            yield sympy.Rational(str(low)) + (sympy.Rational(str(high)) - sympy.Rational(str(low))) * part


def _read(text: str) -> Any:
    tree = ast.parse(text.strip(" "), mode="eval").body
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ValueError("longer than an answer")
    return _formula(tree)


_read_once = lru_cache(maxsize=64)(_read)
"""All answers of a group have the same integrand."""


def _formula(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return sympy.Rational(repr(value))
        case ast.Name(id=name):
            return _NAMED.get(name, sympy.Symbol(name, real=True))
        case ast.UnaryOp(op=sign, operand=operand):
            return _formula(operand) if isinstance(sign, ast.UAdd) else -_formula(operand)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return _FUNCTIONS[name](_formula(argument))
        case ast.BinOp(left=left, op=operator, right=right):
            return _OPERATORS[type(operator)](_formula(left), _formula(right))
    raise ValueError("not a plain expression")
