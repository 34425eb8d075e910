"""A prime field derived from a hash, and values with their derivatives in it (`formal_values`
explains the purpose).
"""

from __future__ import annotations

import ast
from fractions import Fraction
from typing import NamedTuple

import sympy  # type: ignore[import-untyped]

from shared.seeds import number_from

SMALL_PRIMES = 8 * 3 * 5 * 7 * 11 * 13
"""A prime one below a multiple of this has square roots of all these factors, and roots of every
order that divides a power of them.
"""


class Undefined(Exception):
    """There is no value at this point: a pole, or a root that this field does not have."""


class Dual(NamedTuple):
    """Value and derivative, both modulo the prime."""

    value: int
    slope: int


class PrimeField:
    """The integers modulo a prime that is derived from `seed`, so that nobody can choose a multiple
    of it in advance.
    """

    def __init__(self, seed: str) -> None:
        self.seed = seed
        start = self.hash("prime") >> 120
        self.prime = (start - start % SMALL_PRIMES) - 1
        while not sympy.isprime(self.prime):
            self.prime += SMALL_PRIMES

    def combined(self, operator: ast.operator, a: Dual, b: Dual) -> Dual:
        """Sum, difference, product or quotient of two values, with its derivative. Raises
        ValueError for another operator.
        """
        match operator:
            case ast.Add():
                return Dual((a.value + b.value) % self.prime, (a.slope + b.slope) % self.prime)
            case ast.Sub():
                return Dual((a.value - b.value) % self.prime, (a.slope - b.slope) % self.prime)
            case ast.Mult():
                return self.product(a, b)
            case ast.Div():
                return self.product(a, self.power(b, Fraction(-1)))
        raise ValueError("not an operator")

    def product(self, a: Dual, b: Dual) -> Dual:
        """The product, with its derivative by the product rule."""
        return Dual(a.value * b.value % self.prime, (a.slope * b.value + a.value * b.slope) % self.prime)

    def scaled(self, a: Dual, factor: int) -> Dual:
        """`a` multiplied by a number."""
        return Dual(a.value * factor % self.prime, a.slope * factor % self.prime)

    def constant(self, value: int) -> Dual:
        """A value that does not depend on the variable."""
        return Dual(value % self.prime, 0)

    def power(self, base: Dual, exponent: Fraction) -> Dual:
        """`base` to a constant exponent. Raises Undefined at 0, and if this field has no such
        root.
        """
        if exponent == 0:
            return Dual(1, 0)
        if base.value == 0:
            raise Undefined
        if exponent.denominator == 1:
            value = pow(base.value, exponent.numerator, self.prime)
        else:
            # The squares are a group of odd order, so each of them has exactly one root in it, and
            # roots of products are products of roots.
            squares = (self.prime - 1) // 2
            if pow(base.value, squares, self.prime) != 1:
                raise Undefined
            value = pow(base.value, exponent.numerator * pow(exponent.denominator, -1, squares) % squares, self.prime)
        factor = exponent.numerator * self.inverse(exponent.denominator) * self.inverse(base.value)
        return Dual(value, factor * value * base.slope % self.prime)

    def inverse(self, value: int) -> int:
        """One over `value`. Raises Undefined for 0."""
        if value % self.prime == 0:
            raise Undefined
        return pow(value, -1, self.prime)

    def hash(self, name: str) -> int:
        """256 bits derived from the seed and a name."""
        return number_from(f"{self.seed}:{name}", 32)
