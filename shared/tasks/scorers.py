"""Scorers of this project, for the datasets where reasoning-gym's would run the answer as code or
wrongly give full marks.

Each agrees with reasoning-gym's on every answer that follows the question's instructions, including
partial credit (`tests/unit/test_tasks_scorers.py` compares them on generated tasks). Deliberate
differences:

- `game_of_life_halting` compares the word instead of its truth value.
- `puzzle24` requires exactly 24 from exactly the numbers given; reasoning-gym takes any four
  numbers in range and rounds towards zero. `countdown` requires exactly the target. Both require
  integers, because `2.5*4` uses no 2, 5 and 4.
- The docstrings of the other scorers' modules describe their differences.

`shared.tasks.forms` does the same for the remaining datasets.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

from shared.tasks.form_checks import duration, first_number, integer_list, life_board, number_list, read_literal, same_rows
from shared.tasks.scorer_integral import integral

Scorer = Callable[[str, dict[str, Any]], float]
"""Reward for an extracted answer, given reasoning-gym's raw entry. It may raise, which the caller
counts as 0.
"""


def _rows(board: Any) -> str:
    return "\n".join(" ".join(str(cell) for cell in row) for row in board)


def _binary_matrix(answer: str, entry: dict[str, Any]) -> float:
    if same_rows(answer, entry):
        return 1.0
    return 0.1 if _rows(read_literal(answer)) == entry["answer"] else 0.0


def _spiral_matrix(answer: str, entry: dict[str, Any]) -> float:
    oracle = entry["answer"].strip()
    if not answer:
        return 0.0
    if answer.strip() == oracle:
        return 1.0
    return 0.1 if " ".join(str(item) for item in read_literal(answer.strip())) == oracle else 0.0


def _string_insertion(answer: str, entry: dict[str, Any]) -> float:
    if answer == entry["answer"]:
        return 1.0
    return 0.1 if "".join(read_literal(answer)) == entry["answer"] else 0.0


def _n_queens(answer: str, entry: dict[str, Any]) -> float:
    valid = entry["metadata"]["valid_answers"]
    if answer in valid:
        return 1.0
    return 0.5 if "\n".join(" ".join(row) for row in read_literal(answer)) in valid else 0.0


def _or_contained(is_right: Callable[[str, dict[str, Any]], bool]) -> Scorer:
    def score(answer: str, entry: dict[str, Any]) -> float:
        # What cannot be read as the check's kind of list fails the check; reasoning-gym's partial
        # credit stays.
        with suppress(ValueError):
            if is_right(answer, entry):
                return 1.0
        oracle = entry["answer"]
        return len(oracle) / len(answer) if answer and oracle in answer else 0.0

    return score


def _countdown(answer: str, entry: dict[str, Any]) -> float:
    try:
        value = evaluate(answer)
    except (ValueError, ZeroDivisionError):
        return 0.01
    if integers_used(answer) != sorted(entry["metadata"]["numbers"]):
        return 0.05
    return 1.0 if value == entry["metadata"]["target"] else 0.05


def _puzzle24(answer: str, entry: dict[str, Any]) -> float:
    try:
        solved = evaluate(answer) == 24
    except (ValueError, ZeroDivisionError):
        return 0.01
    return 1.0 if solved and integers_used(answer) == sorted(entry["metadata"]["numbers"]) else 0.01


def _game_of_life_halting(answer: str, entry: dict[str, Any]) -> float:
    return 1.0 if answer.strip(" \t\r\n'\".").lower() == str(entry["answer"]).lower() else 0.0


# The scorer of `propositional_logic`. It parses the whole conclusion with this project's grammar
# and judges it by its truth table.
#
# reasoning-gym accepts any lower-case text as a variable, and rewards a premise repeated as the
# conclusion.


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


# The exact value of an arithmetic expression, without any evaluator that could run code.


_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{0,12})?")
_NUMBERS, _ARITHMETIC = re.compile(r"[0-9.]+"), re.compile(r"[0-9.+\-*/() ]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str) -> Fraction:
    """Exact value of `text`, with the usual precedence and unary signs.

    Raises:
        ValueError: `text` contains anything but decimal numbers, `+ - * /`, parentheses and spaces,
            or is too long or nested too deeply.
        ZeroDivisionError: division by zero.
    """
    text = text.strip(" ")
    numbers = _NUMBERS.findall(text)
    if (
        max(len(text) / MAX_CHARS, text.count("(") / MAX_DEPTH) > 1
        or not _ARITHMETIC.fullmatch(text)
        or not all(map(_NUMBER.fullmatch, numbers))
    ):
        raise ValueError("no arithmetic, or too long")
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no arithmetic: {type(error).__name__}") from None


def integers_used(text: str) -> list[int] | None:
    """The numbers of an expression that `evaluate` reads, sorted; None if one of them has a decimal
    point.
    """
    numbers = _NUMBERS.findall(text)
    return None if any("." in number for number in numbers) else sorted(map(int, numbers))


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant():
            return Fraction(text[node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=inner):
            return _value(inner, text) if isinstance(sign, ast.UAdd) else -_value(inner, text)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left, text), _value(right, text))
    raise ValueError("no arithmetic")


SCORERS: dict[str, Scorer] = {
    "binary_matrix": _binary_matrix,
    "spiral_matrix": _spiral_matrix,
    "string_insertion": _string_insertion,
    "n_queens": _n_queens,
    "countdown": _countdown,
    "puzzle24": _puzzle24,
    "game_of_life": life_board,
    "game_of_life_halting": _game_of_life_halting,
    "gsm_symbolic": first_number,
    "intermediate_integration": integral,
    "list_functions": _or_contained(integer_list),
    "number_filtering": _or_contained(number_list),
    "rotate_matrix": _or_contained(same_rows),
    "propositional_logic": propositional_logic,
    "simple_integration": integral,
    "time_intervals": duration,
}
