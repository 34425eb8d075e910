"""Which costs are an offence: a key's account."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.verifier.reputation import COST_HALF_LIFE_S, GRACE_S, MAX_ACCOUNTS, PER_GROUP_S, ScoringCost


@given(st.lists(st.floats(0, PER_GROUP_S), max_size=200), st.floats(0.01, 100.0))
def test_ordinary_groups_are_never_an_offence_at_any_rate(costs: list[float], interval_s: float) -> None:
    book = ScoringCost()
    assert not any(book.charge("U", cost, accepted=True, now_s=number * interval_s) for number, cost in enumerate(costs))


def test_an_honest_sender_whose_answers_are_slow_now_and_then_stays() -> None:
    """One answer in eight runs into the limit of a second: eight groups cost what one hang a group
    costs in one.
    """
    book = ScoringCost()
    assert not any(book.charge("U", 1.0 if number % 4 == 0 else 0.02, accepted=True, now_s=number) for number in range(2000))


def test_one_hang_in_every_group_is_not_free() -> None:
    book = ScoringCost()
    too_much = [number for number in range(200) if book.charge("U", 1.05, accepted=True, now_s=float(number))]
    assert too_much
    assert too_much[0] <= 2.5 * GRACE_S
    assert too_much[1] - too_much[0] < too_much[0], "half of the grace is left afterwards"


def test_refused_groups_have_no_allowance_and_time_heals() -> None:
    book = ScoringCost()
    assert not book.charge("U", GRACE_S - 0.1, accepted=False, now_s=0.0)
    assert not book.charge("U", GRACE_S / 2 - 0.1, accepted=False, now_s=COST_HALF_LIFE_S)
    assert book.charge("U", 1.0, accepted=False, now_s=COST_HALF_LIFE_S)


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    book = ScoringCost()
    for number in range(MAX_ACCOUNTS + 10):
        book.charge(f"U{number}", 1.0, accepted=True, now_s=0.0)
    assert len(book._accounts) == MAX_ACCOUNTS
