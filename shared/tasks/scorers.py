"""Scorers of our own, for the datasets where reasoning-gym's would run the answer as code or gives full marks wrongly.

Each agrees with reasoning-gym's on every answer that follows the question's instructions, partial credit included
(`tests/unit/test_tasks_scorers.py` compares them on generated tasks). Deliberate differences: `game_of_life_halting` compares
the word instead of its truth value, and `puzzle24` wants exactly 24 from exactly the numbers given (reasoning-gym takes any four
numbers in range and rounds towards zero).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from shared.tasks.arithmetic import evaluate
from shared.tasks.literals import read_literal

Scorer = Callable[[str, dict[str, Any]], float]
"""Reward for an extracted answer, given reasoning-gym's raw entry. May raise: the caller counts that as 0."""

_INTEGERS = re.compile(r"\b\d+\b")


def _rows(board: Any) -> str:
    return "\n".join(" ".join(str(cell) for cell in row) for row in board)


def _binary_matrix(answer: str, entry: dict[str, Any]) -> float:
    if answer == entry["answer"]:
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


def _countdown(answer: str, entry: dict[str, Any]) -> float:
    try:
        value = float(evaluate(answer))
    except (ValueError, ZeroDivisionError, OverflowError):
        return 0.01
    if sorted(int(number) for number in _INTEGERS.findall(answer)) != sorted(entry["metadata"]["numbers"]):
        return 0.05
    target = entry["metadata"]["target"]
    # numpy.isclose with the tolerances of reasoning-gym.
    return 1.0 if abs(value - target) <= 1e-6 + 1e-5 * abs(target) else 0.05


def _puzzle24(answer: str, entry: dict[str, Any]) -> float:
    try:
        solved = evaluate(answer) == 24
    except (ValueError, ZeroDivisionError):
        return 0.01
    used = sorted(int(number) for number in _INTEGERS.findall(answer))
    return 1.0 if solved and used == sorted(entry["metadata"]["numbers"]) else 0.01


def _game_of_life_halting(answer: str, entry: dict[str, Any]) -> float:
    return 1.0 if answer.strip(" \t\r\n'\".").lower() == str(entry["answer"]).lower() else 0.0


SCORERS: dict[str, Scorer] = {
    "binary_matrix": _binary_matrix,
    "spiral_matrix": _spiral_matrix,
    "string_insertion": _string_insertion,
    "n_queens": _n_queens,
    "countdown": _countdown,
    "puzzle24": _puzzle24,
    "game_of_life_halting": _game_of_life_halting,
}
