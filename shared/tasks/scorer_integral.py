"""The scorer of the two integration datasets: it differentiates the answer at points, with dual
numbers, and compares.

It does so twice: in a finite field, where no wrong term is too small or too flat to be seen
(`formal_values`), and at real points, which distinguish branches. A step function has slope 0
everywhere, so the answer's distance from the reference must also be the same at all real points.

reasoning-gym passes answers to sympy's parser (Python's `eval`) and asks `simplify` whether a
difference is zero, which takes seconds for an ordinary wrong answer and never ends for some. Here
every node of the answer costs a few multiplications per point, wrong answers fail at the first
point, and nothing depends on what was scored before (mpmath's global precision is not used).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from mpmath.ctx_mp import MPContext  # type: ignore[import-untyped]

from shared.seeds import number_from
from shared.tasks.formal_values import Point
from shared.tasks.formula_reading import is_about_as_long
from shared.tasks.integral_form import is_one_antiderivative, varying_parts
from shared.tasks.prime_field import Undefined

DIGITS = 160
TOLERANCE_DIGITS = 110
"""Right answers differ by rounding, about 10^-155; the smallest difference of a wrong answer that
matters is far larger.
"""
MAX_NODES = 400
MIN_POINTS = 6
"""Number of real points, where the integrand is defined, that must agree."""
RANGES = (
    *((0.0, 0.33), (-0.33, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.5, 4.0), (-4.0, -0.5), (3.0, 20.0), (-20.0, -3.0)),
    *((8.0, 20.0), (-20.0, -8.0), (20.0, 100.0), (-100.0, -20.0), (1e2, 1e4), (-1e4, -1e2), (1e8, 1e12), (-1e12, -1e8)),
)
"""Ranges in which the derivative is compared: one point in each, then a second and a third until
`MIN_POINTS` were in the domain.
"""
FIELD_POINTS, MAX_FIELD_POINTS = 2, 200
"""Number of points of finite fields that must agree, and that are tried at most. Every root halves
the share of points at which it exists.
"""
CONSTANT = "0.7236067977"
"""Value of every letter that is not the variable; its derivative is zero whatever the value is."""

_context = MPContext()
_context.dps = DIGITS
_mp: Any = _context


class _Undefined(Exception):
    """There is no value at this point: a pole, or a logarithm of zero."""


class _Dual(NamedTuple):
    value: Any
    slope: Any


def integral(answer: str, entry: dict[str, Any]) -> float:
    """1 if the answer's derivative equals the integrand at all points compared, else 0."""
    variable, integrand, oracle = entry["metadata"]["variable"], entry["metadata"]["integrand"], entry["answer"]
    is_solved = "Integral(" not in oracle
    if answer == oracle and is_solved:
        return 1.0
    if not is_about_as_long(answer, max(oracle, integrand, key=len)):
        return 0.0
    wanted, given = _tree(integrand), _parsed(answer)
    if not is_one_antiderivative(given, wanted, variable):
        return 0.0
    seed, reference = f"{variable}:{integrand}:{answer}", _tree(oracle) if is_solved else None
    if not _agrees_formally(given, wanted, reference, variable, seed):
        return 0.0
    return _agrees(given, wanted, variable, seed, reference)


def _agrees_formally(given: ast.expr, wanted: ast.expr, reference: ast.expr | None, variable: str, seed: str) -> bool:
    """Whether the derivatives are equal in finite fields, the answer has no branches that the
    reference lacks, and every part of it that contains the variable depends on it.

    Branches could form bumps (`sqrt((x-5)**2)/(x-5) - sqrt((x-6)**2)/(x-6)`); parts that do not
    depend on the variable could hide constants.
    """
    agreed = 0
    for place in range(MAX_FIELD_POINTS):
        point = Point(variable, f"{place}:{seed}")
        try:
            right = point.dual(wanted).value
            if reference is not None:
                point.dual(reference)
            known = set(point.branched)
            if point.dual(given).slope != right or point.branched - known or (known and reference is None):
                return False
            if not agreed and any(point.dual(part).slope == 0 for part in varying_parts(given, variable)):
                return False
        except Undefined:
            continue
        agreed += 1
        if agreed == FIELD_POINTS:
            return True
    return False


def _agrees(given: ast.expr, wanted: ast.expr, variable: str, seed: str, reference: ast.expr | None) -> float:
    """1 if the answer's slope equals the integrand at `MIN_POINTS` real points, which `seed`
    determines. Its distance from the reference must also be the same at all of them; otherwise a
    constant that changes at a jump, with slope 0, would pass.
    """
    agreed, distances = 0, []
    for place, point in enumerate(_points(seed)):
        if place % len(RANGES) == 0 and agreed >= MIN_POINTS:
            break
        try:
            right = _evaluate(wanted, variable, point).value
            if abs(_mp.im(right)) > 0:
                continue
            found = _evaluate(given, variable, point)
            if reference is not None:
                base = _evaluate(reference, variable, point).value
                if _mp.im(base) == 0:
                    distances.append((found.value - base, 1 + abs(base)))
        except _Undefined:
            continue
        if _differ(found.slope, right, 1 + abs(right) + abs(found.slope)):
            return 0.0
        agreed += 1
    if any(_differ(distance, distances[0][0], scale + distances[0][1]) for distance, scale in distances):
        return 0.0
    return float(agreed >= MIN_POINTS)


def _differ(one: Any, other: Any, scale: Any) -> bool:
    return bool(abs(one - other) > scale * _mp.mpf(10) ** -TOLERANCE_DIGITS)


def _points(seed: str) -> Iterator[str]:
    # The points follow from a hash of the answer. Nobody can write an answer that is right only at
    # its own points, and all nodes use the same ones.
    for turn in range(3):
        for low, high in RANGES:
            word = number_from(f"{turn}:{low}:{seed}", 6)
            yield repr(low + (high - low) * (word + 1) / (2**48 + 2))


def _parsed(text: str) -> ast.expr:
    tree = ast.parse(text.strip(" "), mode="eval").body
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ValueError("longer than an answer")
    return tree


_tree = lru_cache(maxsize=64)(_parsed)
"""Cached, because all answers of a group have the same integrand."""


def _evaluate(node: ast.expr, variable: str, point: str) -> _Dual:
    try:
        found = _dual(node, variable, _mp.mpf(point))
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise _Undefined from error
    if not (_mp.isfinite(found.value) and _mp.isfinite(found.slope)):
        raise _Undefined
    return found


def _dual(node: ast.expr, variable: str, at: Any) -> _Dual:
    match node:
        case ast.Constant(value=value):
            # Converted through text, so that 0.1 is a tenth, as for sympy's rationals, and not a
            # binary approximation.
            return _Dual(_mp.mpf(repr(value)), _mp.mpf(0))
        case ast.Name(id=name):
            if name == variable:
                return _Dual(at, _mp.mpf(1))
            named = {"pi": _mp.pi, "E": _mp.e, "I": _mp.j}.get(name)
            return _Dual(+named if named is not None else _mp.mpf(CONSTANT), _mp.mpf(0))
        case ast.UnaryOp(op=sign, operand=operand):
            inner = _dual(operand, variable, at)
            return inner if isinstance(sign, ast.UAdd) else _Dual(-inner.value, -inner.slope)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            inner = _dual(argument, variable, at)
            function, derivative = _FUNCTIONS[name]
            return _Dual(function(inner.value), derivative(inner.value) * inner.slope if inner.slope else _mp.mpf(0))
        case ast.BinOp(left=left, op=operator, right=right):
            return _combined(operator, _dual(left, variable, at), _dual(right, variable, at))
    raise ValueError("not a plain expression")


def _combined(operator: ast.operator, a: _Dual, b: _Dual) -> _Dual:
    """The differentiation rule of one operator. A power with a constant exponent must not use the
    logarithm of its base, which may be negative.
    """
    match operator:
        case ast.Add():
            return _Dual(a.value + b.value, a.slope + b.slope)
        case ast.Sub():
            return _Dual(a.value - b.value, a.slope - b.slope)
        case ast.Mult():
            return _Dual(a.value * b.value, a.slope * b.value + a.value * b.slope)
        case ast.Div():
            value = a.value / b.value
            return _Dual(value, (a.slope - value * b.slope) / b.value)
        case ast.Pow():
            power = a.value**b.value
            slope = b.value * a.value ** (b.value - 1) * a.slope if a.slope and b.value else _mp.mpf(0)
            return _Dual(power, slope + (power * _mp.log(a.value) * b.slope if b.slope else 0))
    raise ValueError("not an operator")


_Real = Callable[[Any], Any]
_FUNCTIONS: dict[str, tuple[_Real, _Real]] = {
    "sin": (_mp.sin, _mp.cos),
    "cos": (_mp.cos, lambda u: -_mp.sin(u)),
    "tan": (_mp.tan, lambda u: 1 + _mp.tan(u) ** 2),
    "cot": (_mp.cot, lambda u: -1 - _mp.cot(u) ** 2),
    "sec": (_mp.sec, lambda u: _mp.sec(u) * _mp.tan(u)),
    "csc": (_mp.csc, lambda u: -_mp.csc(u) * _mp.cot(u)),
    "asin": (_mp.asin, lambda u: 1 / _mp.sqrt(1 - u**2)),
    "acos": (_mp.acos, lambda u: -1 / _mp.sqrt(1 - u**2)),
    "atan": (_mp.atan, lambda u: 1 / (1 + u**2)),
    "acot": (_mp.acot, lambda u: -1 / (1 + u**2)),
    "sinh": (_mp.sinh, _mp.cosh),
    "cosh": (_mp.cosh, _mp.sinh),
    "tanh": (_mp.tanh, lambda u: 1 - _mp.tanh(u) ** 2),
    "asinh": (_mp.asinh, lambda u: 1 / _mp.sqrt(u**2 + 1)),
    "acosh": (_mp.acosh, lambda u: 1 / (_mp.sqrt(u - 1) * _mp.sqrt(u + 1))),
    "atanh": (_mp.atanh, lambda u: 1 / (1 - u**2)),
    "exp": (_mp.exp, _mp.exp),
    "log": (_mp.log, lambda u: 1 / u),
    "ln": (_mp.log, lambda u: 1 / u),
    "sqrt": (_mp.sqrt, lambda u: 1 / (2 * _mp.sqrt(u))),
    "Abs": (abs, lambda u: u / abs(u)),
}
