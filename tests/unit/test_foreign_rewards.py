"""Near misses that strangers are paid for do not count: nobody can write a group in which a mistake
is the best answer.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objectives.advantages import AdvantageConfig, batch_advantages
from services.verifier.rewards import detail_of, foreign_rewards
from shared.rewards import Mark
from shared.tasks.derive import derive_task, task_ref
from shared.tasks.evaluation import PASS_REWARD
from shared.tasks.sandbox import JobResult
from tests.unit.task_answers import score_answer

CONVERSION = task_ref(dataset="base_conversion", config='{"max_base":9,"max_value":40,"min_base":2,"min_value":2}', seed=7, index=0)


def test_a_group_of_paid_near_misses_has_no_advantage_and_one_with_a_right_answer_only_for_that() -> None:
    task = derive_task(CONVERSION)
    near, wrong, right = f"<answer>{task.answer}7</answer>", "<answer>no</answer>", f"<answer>{task.answer}</answer>"
    paid = [score_answer(task, text) for text in (near, wrong, right)]
    assert paid[1] < paid[0] < PASS_REWARD <= paid[2], "the dataset pays for a near miss"
    (poisoned,) = batch_advantages([foreign_rewards(paid[:2] * 4, [False] * 8)], AdvantageConfig())
    assert poisoned == [0.0] * 8
    (mixed,) = batch_advantages([foreign_rewards(paid, [False, False, True])], AdvantageConfig())
    assert mixed[0] == mixed[1] < 0.0 < mixed[2]


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.booleans()), max_size=64))
def test_what_passes_keeps_its_reward_and_all_else_earns_one_and_the_same_below_it(found: list[tuple[float, bool]]) -> None:
    rewards, passed = [reward for reward, _ in found], [passes for _, passes in found]
    counted = foreign_rewards(rewards, passed)
    right = [reward for reward, passes in found if passes]
    wrong = {new for new, passes in zip(counted, passed, strict=True) if not passes}
    assert [new for new, passes in zip(counted, passed, strict=True) if passes] == right
    assert len(wrong) <= 1
    if right and wrong:
        assert max(wrong) < min(right)
    assert not wrong or not right or min(right) <= 0 or wrong == {0.0}


def test_the_detail_of_an_unknown_reward_is_told_only_under_its_own_cause() -> None:
    marks = [Mark.UNSAID, Mark.TIMEOUT, Mark.NOT_A_NUMBER, Mark.RAISED]
    result = JobResult([1.0, None, None, None], None, None, "returned None", 1, 0.1, marks=marks)
    assert [detail_of(result, cause) for cause in ("not_a_number", "raised", "timeout")] == ["returned None", "", ""]
