"""The pace that `generator.groups_per_minute` sets, for one call at a time and for several."""

from __future__ import annotations

import pytest

from services.generator.service import Pace


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("takes_s", [0.5, 7.0, 100.0])
def test_concurrent_calls_together_keep_the_pace(calls: int, takes_s: float) -> None:
    """Each call makes four groups. What one call alone may do, three may not do three times."""
    pace, groups, until_s = Pace(24.0), 0, 3600.0
    free_s = [0.0] * calls
    while min(free_s) < until_s:
        which = free_s.index(min(free_s))
        started_s = free_s[which]
        free_s[which] = max(started_s + takes_s, pace.after(4, started_s))
        groups += 4
    least = min(24.0, calls * 4 * 60.0 / takes_s)
    assert 0.97 * least * 60 <= groups <= 24.0 * 60 + calls * 4


def test_without_a_limit_a_call_is_followed_at_once() -> None:
    assert Pace(0.0).after(64, 5.0) == 5.0
