"""Advantages, by hand and by what must hold for any rewards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objectives.advantages import AdvantageConfig, batch_advantages, group_normalised, leave_one_out
from shared.rewards import is_informative

rewards = st.floats(min_value=-10, max_value=10, allow_nan=False, width=32).map(float)
groups = st.lists(st.lists(rewards, min_size=1, max_size=9), min_size=1, max_size=6)


def test_group_normalised_advantages_are_those_worked_out_by_hand() -> None:
    # mean (1 + 0 + 0 + 1) / 4 = 0.5; sample variance 4 x 0.25 / 3 = 1/3; so +-0.5 / (sqrt(1/3) +
    # 1e-4)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert group_normalised([[1.0, 0.0, 0.0, 1.0]])[0] == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)


def test_the_divisor_uses_the_sample_deviation_unless_told_otherwise() -> None:
    # population variance of (0, 2) is 1, sample variance 2
    assert group_normalised([[0.0, 2.0]], std_ddof=0, std_eps=0.0)[0] == pytest.approx([-1.0, 1.0])
    assert group_normalised([[0.0, 2.0]], std_eps=0.0)[0] == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_batch_scale_divides_every_group_by_the_deviation_of_all_rewards() -> None:
    # all rewards 0 2 1 1 1: mean 1, sample variance (1 + 1) / 4 = 0.5
    divisor = math.sqrt(0.5) + 1e-4
    first, second = group_normalised([[0.0, 2.0], [1.0, 1.0, 1.0]], scale="batch")
    assert first == pytest.approx([-1 / divisor, 1 / divisor])
    assert second == [0.0, 0.0, 0.0]


def test_no_scale_only_centres() -> None:
    assert group_normalised([[1.0, 2.0, 6.0]], scale="none") == [[-2.0, -1.0, 3.0]]


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    # 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2
    assert leave_one_out([1.0, 0.0, 2.0]) == pytest.approx([0.0, -1.5, 1.5])


@pytest.mark.parametrize(
    "config", [AdvantageConfig(scale=scale) for scale in ("group", "batch", "none")] + [AdvantageConfig(kind="leave_one_out")]
)
@pytest.mark.parametrize(
    "flat",
    [[], [0.7], [0.1] * 3, [0.1 + 0.2, 0.3, 0.3], [math.nextafter(1e5, math.inf), 1e5, 1e5], [0.0, 5e-17]],
    ids=["none", "one", "equal", "rounded", "rounded large", "rounded at zero"],
)
def test_a_group_without_spread_has_advantage_exactly_zero(config: AdvantageConfig, flat: list[float]) -> None:
    assert not is_informative(flat)
    advantages = batch_advantages([flat, [0.0, 1.0, 5.0]], config)
    assert advantages[0] == [0.0] * len(flat)
    assert any(advantages[1])


def test_the_mean_of_equal_rewards_is_not_always_equal_to_them() -> None:
    assert sum([0.1] * 3) / 3 != 0.1, "the case above would not try rounding"


@pytest.mark.slow
@given(groups, st.sampled_from(["group", "batch", "none"]), st.sampled_from([0, 1]))
def test_advantages_of_a_group_sum_to_zero(batch: list[list[float]], scale: str, ddof: int) -> None:
    for values in group_normalised(batch, scale=scale, std_ddof=ddof):
        assert abs(math.fsum(values)) < 1e-6 * (1 + max(map(abs, values)))


@given(groups, st.sampled_from(["group_normalised", "leave_one_out"]))
def test_advantages_keep_the_order_of_rewards(batch: list[list[float]], kind: str) -> None:
    for group, values in zip(batch, batch_advantages(batch, AdvantageConfig(kind=kind)), strict=True):
        assert len(values) == len(group)
        for i, first in enumerate(group):
            for j, second in enumerate(group):
                if first > second:
                    assert values[i] >= values[j]


@pytest.mark.slow
@given(groups, rewards)
def test_advantages_do_not_change_when_all_rewards_shift(batch: list[list[float]], shift: float) -> None:
    shifted = [[reward + shift for reward in group] for group in batch]
    for before, after in zip(group_normalised(batch), group_normalised(shifted), strict=True):
        assert before == pytest.approx(after, abs=1e-6)


@given(st.lists(rewards, min_size=2, max_size=9).filter(lambda group: max(group) - min(group) > 1e-3))
def test_group_normalised_advantages_equal_torchs_deviation(group: list[float]) -> None:
    values = torch.tensor(group, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-4)
    assert group_normalised([group])[0] == pytest.approx(expected.tolist(), abs=1e-9)


@given(st.lists(rewards, min_size=2, max_size=9))
def test_leave_one_out_is_the_centred_reward_stretched_by_the_group_size(group: list[float]) -> None:
    stretch = len(group) / (len(group) - 1)
    centred = group_normalised([group], scale="none")[0]
    assert leave_one_out(group) == pytest.approx([stretch * value for value in centred], abs=1e-9)


def test_a_reward_that_is_not_finite_is_refused_with_its_group() -> None:
    with pytest.raises(ValueError, match="group 1 has a reward that is not finite"):
        batch_advantages([[0.0, 1.0], [math.nan, 1.0]], AdvantageConfig())


@pytest.mark.parametrize("wrong", [{"kind": "mean"}, {"scale": "all"}, {"std_ddof": 2}, {"std_eps": -1.0}, {"std_eps": math.nan}])
def test_an_impossible_advantage_setting_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong))).split("_")[0]):
        AdvantageConfig(**wrong)
