"""What a step is counted as, from the line that its trainer writes."""

from __future__ import annotations

import pytest

from lab.step_record import _COPIED, trained_part

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
