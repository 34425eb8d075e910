"""A guessing game: the policy guesses the number that a task asks for, and is told whether it is
higher or lower. The sooner it is right, the more it earns.

[[tasks]]
dataset = "gcd"
environment = "high_low"
max_turns = 4
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.tasks.derive import Item


class HighLow:
    """An environment: pure functions of a task and of what the policy said so far."""

    def reply(self, task: Item, turns: Sequence[str]) -> str | None:
        """What the policy is told after its newest turn; None: the game is over."""
        guess, number = _number(turns[-1]), int(task.task.answer or 0)
        if guess == number:
            return None
        if guess is None:
            return "Say a number."
        return f"It is {'higher' if guess < number else 'lower'} than {guess}."

    def score(self, task: Item, turns: Sequence[str]) -> tuple[float, bool]:
        """The reward, and whether the game was won."""
        won = self.reply(task, turns) is None
        return (1.0 / len(turns), True) if won else (0.0, False)


def _number(turn: str) -> int | None:
    """The last whole number of a turn, if it has one of at most 12 digits."""
    found = re.findall(r"(?<!\d)\d{1,12}(?!\d)", turn[-200:])
    return int(found[-1]) if found else None


HIGH_LOW = HighLow()
