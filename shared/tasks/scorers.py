"""Scorers of this project, for the datasets where reasoning-gym's would run the answer as code,
wrongly give full marks, or pay nearly as much for nothing.

Each agrees with reasoning-gym's on right and wrong answers that follow the question's instructions
(`tests/unit/test_tasks_scorers.py` compares them on generated tasks), but most give no partial
credit. Deliberate differences:

- `puzzle24` requires exactly 24 from exactly the numbers given; reasoning-gym takes any four
  numbers in range and rounds towards zero. `countdown` requires exactly the target. Both require
  integers, because `2.5*4` uses no 2, 5 and 4.
- `game_of_life` and `time_intervals` pay only what is right: their partial credit is nearly 1 for
  an empty board, or for any time where a sender chooses the longest interval.
- `propositional_logic` and the integrals: see their docstrings.

`shared.tasks.forms` does the same for the remaining datasets.
"""

from __future__ import annotations

import ast
import operator
import re
import string
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.parsing.sympy_parser import auto_number, auto_symbol, parse_expr, rationalize  # type: ignore[import-untyped]

from shared.tasks.forms import Check, number_list, same_document
from shared.tasks.formula_reading import is_about_as_long
from shared.tasks.formula_values import is_tame
from shared.tasks.numerals import read_number

Scorer = Callable[[str, dict[str, Any]], float]
"""Reward for an extracted answer, given reasoning-gym's raw entry. It may raise, which the caller
counts as 0.
"""


def _all_or_nothing(is_right: Check) -> Scorer:
    return lambda answer, entry: float(is_right(answer, entry))


def _same(usual: Callable[[str], Any] = str) -> Scorer:
    """Pay the reference answer, as far as `usual` of both tells."""
    return lambda answer, entry: float(usual(answer) == usual(str(entry["answer"])))


def _rows(text: str) -> list[list[str]]:
    return [row.split() for row in text.strip().split("\n")]


def _same_number(answer: str, entry: dict[str, Any]) -> bool:
    value = read_number(answer)
    return value is not None and value == read_number(str(entry["answer"]))


def _countdown(answer: str, entry: dict[str, Any]) -> float:
    try:
        value = evaluate(answer)
    except (ValueError, ZeroDivisionError):
        return 0.01
    if _integers_used(answer) != sorted(entry["metadata"]["numbers"]):
        return 0.05
    return 1.0 if value == entry["metadata"]["target"] else 0.05


def _puzzle24(answer: str, entry: dict[str, Any]) -> float:
    try:
        solved = evaluate(answer) == 24
    except (ValueError, ZeroDivisionError):
        return 0.01
    return 1.0 if solved and _integers_used(answer) == sorted(entry["metadata"]["numbers"]) else 0.01


def _same_word(answer: str, entry: dict[str, Any]) -> bool:
    """`True` or `False`; reasoning-gym compares the truth value of the text."""
    return answer.strip(" \t\r\n'\".").lower() == str(entry["answer"]).lower()


MAX_CHARS, MAX_DEPTH = 400, 40
MAX_VARIABLES, MAX_PREMISES = 10, 12
"""A truth table of 2^10 rows is an integer of 1,024 bits; reasoning-gym's largest level has ten
variables.
"""
UNREADABLE, NOT_ENTAILED, TRIVIAL, RIGHT = 0.0, 0.05, 0.25, 1.0


def propositional_logic(answer: str, entry: dict[str, Any]) -> float:
    """1 for a conclusion that follows and says something new; 0.25 for a trivial one; 0.05 for one
    that does not follow.

    Trivial are: a bare variable, a tautology, anything that follows from contradictory premises,
    and a repeated premise or several of them joined by "and". Changing parentheses, negating twice,
    doubling, or exchanging the sides of ∧, ∨ and ↔ does not make a premise new. reasoning-gym
    accepts any lower-case text as a variable, and rewards a premise repeated as the conclusion.
    """
    from reasoning_gym.logic.propositional_logic import parse_expr as parsed

    variables, premises = sorted(entry["metadata"]["variables"]), entry["metadata"]["premises"]
    if len(variables) > MAX_VARIABLES or len(premises) > MAX_PREMISES or len(answer) > MAX_CHARS:
        return UNREADABLE
    # Bit r of a table is the value in row r; the value of variable i is bit i of the row's number.
    rows = range(1 << len(variables))
    tables = {name: sum(1 << row for row in rows if row >> place & 1) for place, name in enumerate(variables)}
    every = (1 << len(rows)) - 1
    try:
        table, form = _formula(parsed(answer), tables, every)
    except (ValueError, KeyError):
        return UNREADABLE
    known = [_formula(parsed(premise), tables, every) for premise in premises]
    together = every
    for premise, _ in known:
        together &= premise
    if together & ~table:
        return NOT_ENTAILED
    said = _conjuncts(form)
    repeated = frozenset[Any]().union(*(parts for _, premise in known if (parts := _conjuncts(premise)) <= said))
    return TRIVIAL if isinstance(form, str) or not together or table == every or repeated == said else RIGHT


def _formula(expression: Any, tables: dict[str, int], every: int, depth: int = MAX_DEPTH) -> tuple[int, Any]:
    """Truth table and normal form: a variable, or an operator with its sides, as a set where their
    order does not count. Raises KeyError for what is no variable, ValueError for what is nested too
    deeply.
    """
    if not depth:
        raise ValueError("nested too deeply")
    if expression.operator is None:
        return tables[expression.left.strip()], expression.left.strip()
    sign = expression.operator.value
    table, form = _formula(expression.left, tables, every, depth - 1)
    if sign == "¬":
        return every & ~table, form[1] if form[0] == "¬" else ("¬", form)
    other_table, other_form = _formula(expression.right, tables, every, depth - 1)
    if sign == "→":
        return (every & ~table) | other_table, (sign, form, other_form)
    if sign == "↔":
        return every & ~(table ^ other_table), (sign, frozenset((form, other_form)))
    parts = frozenset[Any]().union(*(each[1] if each[0] == sign else (each,) for each in (form, other_form)))
    return table | other_table if sign == "∨" else table & other_table, (sign, parts) if len(parts) > 1 else next(iter(parts))


def _conjuncts(form: Any) -> frozenset[Any]:
    return form[1] if form[0] == "∧" else frozenset((form,))


DIGITS = 40
TOLERANCE = sympy.Float(10, DIGITS) ** -25
POINTS = [
    sympy.Rational(sign * size, 101)
    for size in (33, 9, 71, 160, 1301, 500, 21, 3, 97, 205, 409, 733, 1777, 1999, 1103, 1450, 1600)
    for sign in (1, -1)
]
SPREAD_POINTS, MIN_POINTS = 12, 6
"""These first points are looked at in any case, and then further ones until the integrand was real
at so many.
"""
_LETTERS = {letter: sympy.Symbol(letter, real=True) for letter in string.ascii_letters if letter not in "EI"}


def integral(answer: str, entry: dict[str, Any]) -> float:
    """1 if the answer's derivative has the integrand's values, with at most one other letter as the
    constant, else 0. The answer must have passed `is_plain_expression`.

    reasoning-gym asks `simplify` whether a difference is zero, which takes seconds for an ordinary
    wrong answer and never ends for some. A derivative at some points hides constants, steps and
    terms too flat to be seen. An answer of this node's own policy has no reason to carry any, so
    these datasets are scored locally only (`SCORED_LOCALLY`): no group of another node is taken.
    """
    name, integrand, oracle = entry["metadata"]["variable"], entry["metadata"]["integrand"], entry["answer"]
    if answer == oracle and "Integral(" not in oracle:
        return 1.0
    if not is_about_as_long(answer, max(oracle, integrand, key=len)):
        return 0.0
    variable, wanted, given = sympy.Symbol(name, real=True), _parsed_once(integrand, name), _parsed(answer, name)
    constants = given.free_symbols - {variable}
    if len(constants) > 1 or not is_tame(given) or any(abs(given.coeff(letter)) != 1 for letter in constants):
        return 0.0
    slope, agreed = sympy.diff(given, variable), 0
    for place, point in enumerate(POINTS):
        if agreed >= MIN_POINTS and place >= SPREAD_POINTS:
            break
        right, found = (each.evalf(DIGITS, subs={variable: point}) for each in (wanted, slope))
        if not (right.is_real and right.is_finite):
            continue
        if not found.is_number or abs(found - right) > (1 + abs(right)) * TOLERANCE:
            return 0.0
        agreed += 1
    return float(agreed >= MIN_POINTS)


def _parsed(text: str, variable: str) -> Any:
    names = {**_LETTERS, variable: sympy.Symbol(variable, real=True)}
    return parse_expr(text.strip(" "), names, (auto_symbol, auto_number, rationalize))


_parsed_once = lru_cache(maxsize=64)(_parsed)
"""All answers of a group have the same integrand."""


# The exact value of an arithmetic expression, without any evaluator that could run code.


_ARITHMETIC = re.compile(r"[0-9+\-*/() ]{1,400}")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str) -> Fraction:
    """Exact value of `text`, with the usual precedence and unary signs.

    Raises:
        ValueError: `text` contains anything but integers, `+ - * /`, parentheses and spaces, or is
            too long or nested too deeply.
        ZeroDivisionError: division by zero.
    """
    if not _ARITHMETIC.fullmatch(text) or text.count("(") > MAX_DEPTH:
        raise ValueError("no arithmetic, or too long")
    try:
        return _value(ast.parse(text.strip(" "), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no arithmetic: {type(error).__name__}") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=inner):
            return _value(inner) if isinstance(sign, ast.UAdd) else -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError("no arithmetic")


def _integers_used(text: str) -> list[int]:
    return sorted(map(int, re.findall("[0-9]+", text)))


SCORERS: dict[str, Scorer] = {
    "binary_matrix": _same(_rows),
    "codeio": _all_or_nothing(same_document),
    "countdown": _countdown,
    "game_of_life": _all_or_nothing(same_document),
    "game_of_life_halting": _all_or_nothing(_same_word),
    "gsm_symbolic": _all_or_nothing(_same_number),
    "intermediate_integration": integral,
    "list_functions": _all_or_nothing(same_document),
    "n_queens": _all_or_nothing(lambda answer, entry: answer in entry["metadata"]["valid_answers"]),
    "number_filtering": _all_or_nothing(number_list),
    "propositional_logic": propositional_logic,
    "puzzle24": _puzzle24,
    "rotate_matrix": _same(_rows),
    "simple_integration": integral,
    "spiral_matrix": _same(),
    "string_insertion": _same(),
    "time_intervals": _same(),
}
