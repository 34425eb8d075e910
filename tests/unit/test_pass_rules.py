"""Which answers pass: what a scorer says, `pass_at`, full marks, or the higher of two rewards."""

from __future__ import annotations

from services.verifier.rewards import foreign_rewards
from shared.config import TaskSpec
from shared.contracts.messages import TaskRef
from shared.rewards import Mark
from shared.tasks.evaluation import PassRules

REF = TaskRef(dataset="gcd", seed=1, index=0)
U, P, F = Mark.UNSAID, Mark.PASSED, Mark.FAILED


def rules(pass_at: float | None = None) -> PassRules:
    """Of a source whose verifier is one's own, which need not be installed here."""
    return PassRules([TaskSpec.model_construct(dataset="gcd", verifier="mine", config={}, pass_at=pass_at)])


def noted(known: PassRules, rewards: list[float], marks: list[Mark]) -> list[bool] | None:
    known.note(REF, rewards, marks)
    return known.passed(REF, rewards, marks)


def test_where_a_scorer_says_what_passes_nothing_else_does() -> None:
    only_right_ones = noted(rules(), [1.0, 0.5, 0.5, 0.0, 1.0], [P, U, U, U, P])
    assert only_right_ones == [True, False, False, False, True]
    early_return = rules()
    assert noted(early_return, [1.0, 0.3, 0.0], [P, F, U]) == [True, False, False]
    assert early_return.is_defined(REF)
    foreign = early_return.passed(REF, [0.0, 0.5], [U, U])
    assert foreign == [False, False] and foreign_rewards([0.0, 0.5], foreign) == [0.0, 0.0]


def test_the_higher_of_two_rewards_passes_also_where_it_is_rounded() -> None:
    right, same = 0.1 + 0.2 + 0.7, 0.7 + 0.2 + 0.1
    assert right != same
    assert noted(rules(), [right, 0.0, same, 0.0], [U] * 4) == [True, False, True, False]
    assert noted(rules(), [0.0, 0.1 + 0.2, 0.3], [U] * 3) == [False, True, True]


def test_one_reward_or_three_define_no_pass_and_pass_at_does() -> None:
    assert noted(rules(), [1.0, 1.0], [U, U]) is None
    assert noted(rules(), [1.0, 0.5, 0.0], [U] * 3) is None
    assert noted(rules(pass_at=0.5), [1.0, 0.5, 0.0], [U] * 3) == [True, True, False]
