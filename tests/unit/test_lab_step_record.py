"""What a run of real services is counted as, from the lines that its trainers write."""

from __future__ import annotations

from typing import Any

import pytest

from lab.arms import plan_run
from lab.spec import SpecError, parse_spec
from lab.step_record import _COPIED, check_services_run, trained_part

LINE = {
    **dict.fromkeys(_COPIED, 0),
    "groups_local": 4,
    "groups_external": 2,
    "reward_local": 0.25,
    "reward_external": 0.5,
    "staleness_mean": 1.0,
    "importance_ratio": 1.0,
    "importance_ratio_max": 1.0,
}


def test_replayed_groups_were_generated_for_an_earlier_step_and_are_counted_there() -> None:
    again = trained_part({**LINE, "groups_replayed": 6, "reward_replayed": 1.0})
    assert (again["groups_local"], again["groups_replayed"]) == (4, 6)
    assert (again["replayed_reward"], again["staleness"]) == (1.0, 1.0)
    assert again["trained_reward"] == pytest.approx((4 * 0.25 + 2 * 0.5 + 6 * 1.0) / 12)


def test_lines_without_replay_or_of_an_older_trainer_are_read_as_before() -> None:
    old = trained_part(LINE)
    assert old == trained_part({**LINE, "groups_replayed": 0, "reward_replayed": None})
    assert "groups_replayed" not in old and old["trained_reward"] == pytest.approx((4 * 0.25 + 2 * 0.5) / 6)


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ({"delay_rounds": [1, 3]}, "delay_rounds"),
        ({"nodes": [{"count": 1}, {"count": 1, "role": "starve"}]}, "role starve"),
    ],
)
def test_what_only_a_simulation_can_do_is_refused_before_real_services_start(arm: dict[str, Any], said: str) -> None:
    spec = parse_spec({"name": "x", "seeds": [1], "rounds": 3, "nodes": 1, "tasks": [{"dataset": "gcd"}], "arms": {"a": arm}})
    with pytest.raises(SpecError, match=said):
        check_services_run(plan_run(spec, "a", 1))
