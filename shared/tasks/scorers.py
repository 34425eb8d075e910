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

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shared.tasks.arithmetic import evaluate, integers_used
from shared.tasks.forms_numbers import duration, first_number, integer_list, number_list
from shared.tasks.forms_puzzles import life_board
from shared.tasks.forms_text import same_rows
from shared.tasks.literals import read_literal
from shared.tasks.scorer_integral import integral
from shared.tasks.scorer_logic import propositional_logic

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
