"""`pytest test_brief.py`, in the environment that the example is installed in."""

from __future__ import annotations

import pytest
from swarm_example_verifier import brief

from shared.contracts.messages import TaskRef
from shared.tasks.derive import derive_item


def test_the_bare_answer_is_paid_in_full_and_much_talk_not_at_all() -> None:
    item = derive_item(TaskRef(dataset="gcd", config="{}", seed=1, index=0))
    score, right = brief(item), item.task.answer
    assert score(str(right)) == 1.0
    assert score(f"It is {right}") == 0.5
    assert score(f"I have thought about it for long: it is {right}") == 0.0


@pytest.mark.parametrize("answer", ["", " ", "-1", "9" * 100_000, "\x00"])
def test_no_answer_of_a_stranger_is_paid_or_raises(answer: str) -> None:
    item = derive_item(TaskRef(dataset="gcd", config="{}", seed=1, index=0))
    assert brief(item)(answer) == 0.0
