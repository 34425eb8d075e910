"""`pytest test_high_low.py`, in the environment that the example is installed in."""

from __future__ import annotations

import pytest
from swarm_example_environment import HIGH_LOW

from shared.tasks.derive import Item, derive_item, task_ref


def task() -> Item:
    return derive_item(task_ref("gcd", seed=1, index=0))


def test_a_game_is_won_by_what_it_is_told() -> None:
    number = int(task().task.answer or 0)
    turns = [f"Is it {number + 1}?"]
    assert HIGH_LOW.reply(task(), turns) == f"It is lower than {number + 1}."
    turns.append(str(number))
    assert HIGH_LOW.reply(task(), turns) is None
    assert HIGH_LOW.score(task(), turns) == (0.5, True)


@pytest.mark.parametrize("turn", ["", "no", "-", "9" * 100_000, "\x00"])
def test_no_turn_of_a_stranger_is_paid_or_raises(turn: str) -> None:
    assert HIGH_LOW.reply(task(), [turn]) == "Say a number."
    assert HIGH_LOW.score(task(), [turn]) == (0.0, False)
