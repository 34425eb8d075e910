"""The exact value of an arithmetic expression, without any evaluator that could run code."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 400
MAX_DEPTH = 40

_TOKEN = re.compile(r" *(?:((?:0|[1-9][0-9]{0,11})(?:\.[0-9]{0,12})?)|([-+*/()]))")


class ArithmeticSyntaxError(ValueError):
    """The text is not an expression over decimal numbers, `+ - * /` and parentheses."""


def evaluate(text: str) -> Fraction:
    """Exact value of `text`, with the usual precedence and unary signs.

    Raises:
        ArithmeticSyntaxError: `text` contains anything but numbers, `+ - * /`, parentheses and
            spaces, or is too long or nested too deeply.
        ZeroDivisionError: division by zero.
    """
    parser = _Parser(_tokens(text))
    value = parser.sum(0)
    if parser.peek() is not None:
        raise ArithmeticSyntaxError(f"unexpected {parser.peek()!r}")
    return value


def integers_used(text: str) -> list[int] | None:
    """The numbers of an expression that `evaluate` reads, sorted; None if one of them has a decimal
    point.
    """
    numbers = [token for token in _tokens(text) if token[0].isdigit()]
    return None if any("." in number for number in numbers) else sorted(map(int, numbers))


def _tokens(text: str) -> list[str]:
    text = text.strip(" ")
    if not text or len(text) > MAX_CHARS:
        raise ArithmeticSyntaxError("empty or too long")
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ArithmeticSyntaxError(f"unexpected character at {position}")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    def peek(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self) -> str | None:
        token = self.peek()
        self._position += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value += sign * self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.peek() in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
            else:
                value /= self._factor(depth)
        return value

    def _factor(self, depth: int) -> Fraction:
        """A number, a sign before a factor, or a sum in parentheses. `depth` limits the recursion,
        because ten thousand parentheses in a foreign answer would exhaust the stack.
        """
        if depth > MAX_DEPTH:
            raise ArithmeticSyntaxError("nested too deeply")
        token = self._take()
        if token == "-":
            return -self._factor(depth + 1)
        if token == "+":
            return self._factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ArithmeticSyntaxError("unclosed parenthesis")
            return value
        if token is None or not token[0].isdigit():
            raise ArithmeticSyntaxError(f"expected a number, got {token!r}")
        return Fraction(token)
