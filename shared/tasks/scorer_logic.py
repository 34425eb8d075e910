"""The scorer of `propositional_logic`. It parses the whole conclusion with this project's grammar
and judges it by its truth table.

reasoning-gym accepts any lower-case text as a variable, and rewards a premise repeated as the
conclusion.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MAX_CHARS = 400
MAX_VARIABLES = 10
"""A truth table of 2^10 rows is an integer of 1,024 bits; reasoning-gym's largest level has ten
variables.
"""
MAX_DEPTH = 40
MAX_PREMISES = 12

UNREADABLE, NOT_ENTAILED, TRIVIAL, RIGHT = 0.0, 0.05, 0.25, 1.0

_BINARY = ("↔", "→", "∨", "∧")
"""Loosest first; each is left-associative, as in reasoning-gym."""


def propositional_logic(answer: str, entry: dict[str, Any]) -> float:
    """1 for a conclusion that follows and says something new; 0.25 for a trivial one; 0.05 for one
    that does not follow.

    Trivial are: a bare variable, a tautology, anything that follows from contradictory premises,
    and a repeated premise or several of them joined by "and". Changing parentheses, negating twice,
    doubling, or exchanging the sides of ∧, ∨ and ↔ does not make a premise new.
    """
    variables = sorted(entry["metadata"]["variables"])
    premises = entry["metadata"]["premises"]
    if len(variables) > MAX_VARIABLES or len(premises) > MAX_PREMISES or len(answer) > MAX_CHARS:
        return UNREADABLE
    reader = _Reader(variables)
    try:
        conclusion = reader.read(answer)
    except ValueError:
        return UNREADABLE
    known = [reader.read(premise) for premise in premises]
    together = reader.every
    for premise in known:
        together &= premise.table
    if together & ~conclusion.table:
        return NOT_ENTAILED
    bare = isinstance(conclusion.form, str)
    trivial = (
        bare or not together or conclusion.table == reader.every or _restates(conclusion.form, [premise.form for premise in known])
    )
    return TRIVIAL if trivial else RIGHT


Form = str | tuple[str, frozenset[Any]] | tuple[str, Any, Any]
"""The normal form of a formula: a variable, an operator with its operands as a set, or an operator
with its two sides.
"""


class _Formula(NamedTuple):
    table: int
    form: Form


def _restates(conclusion: Form, premises: list[Form]) -> bool:
    said = _conjuncts(conclusion)
    repeated: set[Any] = set()
    for premise in premises:
        if _conjuncts(premise) <= said:
            repeated |= _conjuncts(premise)
    return repeated == said


def _conjuncts(form: Form) -> frozenset[Any]:
    return form[1] if isinstance(form, tuple) and form[0] == "∧" else frozenset((form,))


def _joined(operator: str, left: Form, right: Form) -> Form:
    if operator == "→":
        return (operator, left, right)
    if operator == "↔":
        return (operator, frozenset((left, right)))
    parts: set[Any] = set()
    for side in (left, right):
        parts |= side[1] if isinstance(side, tuple) and side[0] == operator else {side}
    return (operator, frozenset(parts)) if len(parts) > 1 else parts.pop()


def _negated(form: Form) -> Form:
    return next(iter(form[1])) if isinstance(form, tuple) and form[0] == "¬" else ("¬", frozenset((form,)))


def _tables(variables: list[str]) -> dict[str, int]:
    # Bit r of a table is the value in row r; the value of variable i is bit i of the row's number.
    rows = range(1 << len(variables))
    return {name: sum(1 << row for row in rows if row >> place & 1) for place, name in enumerate(variables)}


class _Reader:
    """A recursive-descent parser of formulas over the given variables."""

    def __init__(self, variables: list[str]) -> None:
        self.every = (1 << (1 << len(variables))) - 1
        """The truth table of a tautology."""
        self._tables = _tables(variables)
        self._text = ""
        self._at = 0

    def read(self, text: str) -> _Formula:
        """Truth table and normal form of `text`, which must be a formula as a whole; raises
        `ValueError` otherwise.
        """
        self._text, self._at = "".join(text.split()), 0
        formula = self._binary(0, 0)
        if self._at != len(self._text):
            raise ValueError("text after the formula")
        return formula

    def _binary(self, level: int, depth: int) -> _Formula:
        if level == len(_BINARY):
            return self._unary(depth)
        operator = _BINARY[level]
        left = self._binary(level + 1, depth)
        while self._text.startswith(operator, self._at):
            self._at += 1
            right = self._binary(level + 1, depth)
            left = _Formula(self._apply(operator, left.table, right.table), _joined(operator, left.form, right.form))
        return left

    def _apply(self, operator: str, left: int, right: int) -> int:
        match operator:
            case "↔":
                return self.every & ~(left ^ right)
            case "→":
                return (self.every & ~left) | right
            case "∨":
                return left | right
        return left & right

    def _unary(self, depth: int) -> _Formula:
        """A variable, a negation, or a formula in parentheses. A formula's table is an integer with
        one bit per row of the truth table, so `every & ~table` is its negation.
        """
        if depth > MAX_DEPTH or self._at >= len(self._text):
            raise ValueError("nested too deeply, or cut off")
        sign = self._text[self._at]
        self._at += 1
        if sign == "¬":
            inner = self._unary(depth + 1)
            return _Formula(self.every & ~inner.table, _negated(inner.form))
        if sign == "(":
            inner = self._binary(0, depth + 1)
            if not self._text.startswith(")", self._at):
                raise ValueError("unclosed parenthesis")
            self._at += 1
            return inner
        if sign not in self._tables:
            raise ValueError("not a variable of the question")
        return _Formula(self._tables[sign], sign)
