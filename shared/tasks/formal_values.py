"""Values and derivatives of formulas in a finite field, where nothing is small and no function is
flat.

At real points a wrong term can hide: `x/10**130` is below any tolerance, `tanh(10**60*(x-5))` has
no slope. So here the variable is a random element of a prime field, exponentials are powers of
random elements, sines and cosines are coordinates of powers of a random point of the circle, and
other functions are random elements, one for each value of their argument; sum and product rules,
angle sums and laws of exponents hold exactly. Formulas that differ have different values except
with negligible probability (Schwartz-Zippel). The field is derived from a hash of the answer, so
that nobody can write a multiple of its prime. Branches (`sqrt(x**2)` and `x`) are the same here:
only values at real points distinguish them, and `Point.branched` says whether there are any.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from math import prod

from shared.tasks.prime_field import Dual, PrimeField

DENOMINATOR = 720_720
"""Denominators of coefficients inside exponentials and sines must divide this, the least common
multiple of 1 to 16.
"""
MAX_COEFFICIENT, MAX_DEGREE, MAX_BITS = 10_000, 12, 400
"""Limits of a polynomial inside an exponential or a sine, and of the bits of any intermediate
number.
"""

PI = -1
"""Key of a polynomial's term in pi."""

Polynomial = dict[int, Fraction]


class Point:
    """A point of a prime field; both follow from a hash of `seed`.

    Raises (in `dual`):
        Undefined: no value here; another point may have one.
        ValueError: a formula that this model does not cover.
    """

    def __init__(self, variable: str, seed: str) -> None:
        self.variable, self.field = variable, PrimeField(seed)
        self.prime = self.field.prime
        self.at = self.field.hash("variable") % self.prime
        self.branched: set[tuple[str, int]] = set()
        """Roots, logarithms and inverse functions met so far, each with its argument up to a
        constant factor.
        """

    def dual(self, node: ast.expr) -> Dual:
        """Value of `node` and its derivative with respect to the variable."""
        match node:
            case ast.Constant(value=value):
                number = Fraction(repr(value))
                return self.field.constant(number.numerator * self.field.inverse(number.denominator))
            case ast.Name(id="I"):
                raise ValueError("complex")
            case ast.Name(id="E"):
                return self._exponential({0: Fraction(1)})
            case ast.Name(id=name):
                return Dual(self.at, 1) if name == self.variable else self.field.constant(self.field.hash(f"constant {name}"))
            case ast.UnaryOp(op=sign, operand=operand):
                inner = self.dual(operand)
                return inner if isinstance(sign, ast.UAdd) else self.field.scaled(inner, -1)
            case ast.Call(func=ast.Name(id="log" | "ln"), args=[argument]):
                return self._logarithm(argument)
            case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
                return self._root(argument, Fraction(1, 2))
            case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _INVERSE:
                self._meet(_CO_FUNCTIONS.get(name, name), argument)
                return self._inverse_function(name, self.dual(argument))
            case ast.Call(func=ast.Name(id=name), args=[argument]):
                return self._elementary(name, polynomial(argument, self.variable))
            case ast.BinOp(left=ast.Name(id="E"), op=ast.Pow(), right=exponent):
                return self._exponential(polynomial(exponent, self.variable))
            case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
                return self._root(base, constant(exponent, self.variable))
            case ast.BinOp(left=left, op=operator, right=right):
                return self.field.combined(operator, self.dual(left), self.dual(right))
        raise ValueError("not a plain expression")

    def _root(self, base: ast.expr, exponent: Fraction) -> Dual:
        if exponent.denominator != 1:
            self._meet("root", base)
        return self.field.power(self.dual(base), exponent)

    def _meet(self, name: str, argument: ast.expr) -> int:
        # Divide by the argument's constant factor. A constant has no branches.
        try:
            factors = polynomial(argument, self.variable)
        except ValueError:
            leading = Fraction(1)
        else:
            if not factors.keys() - {0}:
                return 1
            leading = abs(factors[max(factors)]) if name == "root" else factors[max(factors)]
        factor = leading.numerator * self.field.inverse(leading.denominator) % self.prime
        self.branched.add((name, self.dual(argument).value * self.field.inverse(factor) % self.prime))
        return factor

    def _exponential(self, exponent: Polynomial) -> Dual:
        if PI in exponent:
            raise ValueError("pi in an exponent")
        value = prod(
            pow(self.field.hash(f"exponential {degree}") % self.prime, _whole(factor), self.prime)
            for degree, factor in exponent.items()
        )
        return Dual(value % self.prime, value * self._derivative(exponent) % self.prime)

    def _derivative(self, of: Polynomial) -> int:
        terms = (
            degree * factor.numerator * self.field.inverse(factor.denominator) * pow(self.at, degree - 1, self.prime)
            for degree, factor in of.items()
            if degree > 0
        )
        return sum(terms) % self.prime

    def _circle(self, angle: Polynomial) -> tuple[Dual, Dual]:
        # Cosine and sine. -1 is not a square here, so the field extended by `i` has a circle that
        # contains (a + bi)/(a - bi).
        cosine, sine = 1, 0
        for degree, factor in angle.items():
            if degree == PI:
                turn, times = (self._eighth(), self._eighth()), _eighths(factor)
            else:
                a, b = (self.field.hash(f"circle {degree} {side}") % self.prime for side in "ab")
                norm = self.field.inverse(a * a + b * b)
                turn, times = ((a * a - b * b) * norm % self.prime, 2 * a * b * norm % self.prime), _whole(factor)
            if times < 0:
                times, turn = -times, (turn[0], -turn[1] % self.prime)
            while times:
                if times & 1:
                    cosine, sine = (
                        (cosine * turn[0] - sine * turn[1]) % self.prime,
                        (cosine * turn[1] + sine * turn[0]) % self.prime,
                    )
                turn = ((turn[0] * turn[0] - turn[1] * turn[1]) % self.prime, 2 * turn[0] * turn[1] % self.prime)
                times >>= 1
        slope = self._derivative(angle)
        return Dual(cosine, -sine * slope % self.prime), Dual(sine, cosine * slope % self.prime)

    def _eighth(self) -> int:
        # Cosine and sine of pi/4.
        return self.field.power(Dual(2, 0), Fraction(-1, 2)).value

    def _elementary(self, name: str, argument: Polynomial) -> Dual:
        if name == "exp":
            return self._exponential(argument)
        if name in _HYPERBOLIC:
            up, down = self._exponential(argument), self._exponential({degree: -factor for degree, factor in argument.items()})
            half = self.field.constant(self.field.inverse(2))
            cosine = self.field.product(half, self.field.combined(ast.Add(), up, down))
            sine = self.field.product(half, self.field.combined(ast.Sub(), up, down))
            return self._ratio(name.removesuffix("h"), cosine, sine)
        cosine, sine = self._circle(argument)
        return self._ratio(name, cosine, sine)

    def _ratio(self, name: str, cosine: Dual, sine: Dual) -> Dual:
        one = Dual(1, 0)
        top, bottom = {
            "cos": (cosine, one),
            "sin": (sine, one),
            "tan": (sine, cosine),
            "cot": (cosine, sine),
            "sec": (one, cosine),
            "csc": (one, sine),
        }.get(name, (one, None))
        if bottom is None:
            raise ValueError(f"no function of this model: {name}")
        return self.field.combined(ast.Div(), top, bottom)

    def _inverse_function(self, name: str, argument: Dual) -> Dual:
        if name in ("acos", "acot"):
            other = self._inverse_function(_CO_FUNCTIONS[name], argument)
            quarter = self.field.constant(self.field.hash("constant pi") * self.field.inverse(2))
            return self.field.combined(ast.Sub(), quarter, other)
        square = argument.value * argument.value
        # All of these functions are odd, except acosh, so the argument's sign can be factored out.
        sign = -1 if name != "acosh" and argument.value > self.prime // 2 else 1
        value = sign * self.field.hash(f"{name} {sign * argument.value % self.prime}")
        outer, is_root = _INVERSE[name]
        divisor = self.field.constant(outer(square))
        if is_root:
            divisor = self.field.power(divisor, Fraction(1, 2))
        return Dual(value % self.prime, argument.slope * self.field.inverse(divisor.value) % self.prime)

    def _logarithm(self, node: ast.expr) -> Dual:
        # Factor products, powers and absolute values, so that logarithms of equal values are equal
        # however they are written.
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self.field.combined(ast.Add(), self._logarithm(left), self._logarithm(right))
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self.field.combined(ast.Sub(), self._logarithm(left), self._logarithm(right))
            case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
                times = constant(exponent, self.variable)
                factor = times.numerator * self.field.inverse(times.denominator)
                return self.field.scaled(self._logarithm(base), factor)
            case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
                return self.field.scaled(self._logarithm(argument), self.field.inverse(2))
            case ast.Call(func=ast.Name(id="Abs"), args=[argument]):
                return self._logarithm(argument)
        inner, factor = self.dual(node), self._meet("log", node)
        slope = inner.slope * self.field.inverse(inner.value)
        value = self.field.hash(f"log {inner.value * self.field.inverse(factor) % self.prime}") + self.field.hash(f"log {factor}")
        return Dual(value % self.prime if inner != Dual(1, 0) else 0, slope % self.prime)


_HYPERBOLIC = frozenset({"sinh", "cosh", "tanh"})
_CO_FUNCTIONS = {"acos": "asin", "acot": "atan"}
_INVERSE: dict[str, tuple[Callable[[int], int], bool]] = {
    "asin": (lambda square: 1 - square, True),
    "acos": (lambda square: 1 - square, True),
    "atan": (lambda square: 1 + square, False),
    "acot": (lambda square: 1 + square, False),
    "asinh": (lambda square: square + 1, True),
    "acosh": (lambda square: square - 1, True),
    "atanh": (lambda square: 1 - square, False),
}
"""What the derivative is divided by, as a function of the argument's square, and whether that is
under a root.
"""


def _whole(factor: Fraction) -> int:
    if abs(factor) > MAX_COEFFICIENT or DENOMINATOR % factor.denominator:
        raise ValueError("a coefficient that nobody needs")
    return factor.numerator * (DENOMINATOR // factor.denominator)


def _eighths(factor: Fraction) -> int:
    if 4 % factor.denominator:
        raise ValueError("a multiple of pi that nobody needs")
    return 4 * factor.numerator // factor.denominator % 8


def constant(node: ast.expr, variable: str) -> Fraction:
    """The value of an arithmetic expression of numbers; ValueError for anything else."""
    found = polynomial(node, variable)
    if any(found.keys() - {0}):
        raise ValueError("not a number")
    return found.get(0, Fraction(0))


def polynomial(node: ast.expr, variable: str) -> Polynomial:
    """The coefficients of an arithmetic expression by degree (`PI`: of pi), without zeros.
    ValueError if it is not a polynomial of bounded size.
    """
    match node:
        case ast.Constant(value=value):
            return _nonzero({0: Fraction(repr(value))})
        case ast.Name(id=name) if name == variable:
            return {1: Fraction(1)}
        case ast.Name(id="pi"):
            return {PI: Fraction(1)}
        case ast.UnaryOp(op=sign, operand=operand):
            inner = polynomial(operand, variable)
            return inner if isinstance(sign, ast.UAdd) else _times(inner, {0: Fraction(-1)})
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
            sign_of_right = Fraction(1 if isinstance(operator, ast.Add) else -1)
            a, b = polynomial(left, variable), _times(polynomial(right, variable), {0: sign_of_right})
            return _nonzero({degree: a.get(degree, Fraction(0)) + b.get(degree, Fraction(0)) for degree in a | b})
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _times(polynomial(left, variable), polynomial(right, variable))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            divisor = constant(right, variable)
            if divisor == 0:
                raise ValueError("division by zero")
            return _times(polynomial(left, variable), {0: 1 / divisor})
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            times, inner = constant(exponent, variable), polynomial(base, variable)
            if times.denominator != 1 or not 0 <= times <= MAX_DEGREE:
                raise ValueError("not a power of a polynomial")
            found = {0: Fraction(1)}
            for _ in range(times.numerator):
                found = _times(found, inner)
            return found
    raise ValueError("not a polynomial")


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    if any(PI in one and other.keys() - {0} for one, other in ((a, b), (b, a))):
        raise ValueError("a multiple of pi that nobody needs")
    found: Polynomial = {}
    for degree_a, factor_a in a.items():
        for degree_b, factor_b in b.items():
            found[degree_a + degree_b] = found.get(degree_a + degree_b, Fraction(0)) + factor_a * factor_b
    return _nonzero(found)


def _nonzero(found: Polynomial) -> Polynomial:
    kept = {degree: factor for degree, factor in found.items() if factor}
    if any(degree > MAX_DEGREE or max(abs(factor.numerator), factor.denominator) >> MAX_BITS for degree, factor in kept.items()):
        raise ValueError("larger than an argument")
    return kept
