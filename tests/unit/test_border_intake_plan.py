"""The choice of the messages that a verifier reads."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.verifier.fair_queue import TokenBucket
from services.verifier.swarm_reader import KEPT, LEAST_SPREAD, SPREAD, plan_intake, unread_positions
from shared.contracts.control import IntakeCursor


@given(
    st.lists(st.integers(1, 10_000), unique=True, max_size=300).map(sorted),
    st.integers(0, 300),
    st.sets(st.integers(1, 10_000), max_size=20),
    st.integers(),
)
def test_no_more_is_read_than_wanted_none_twice_and_the_rest_stays_unread(
    unread: list[int], wanted: int, at_hand: set[int], seed: int
) -> None:
    plan = plan_intake(unread, wanted, Random(seed), at_hand)
    assert len(plan.positions) == min(wanted, len(unread))
    assert sorted([*plan.positions, *plan.unread]) == unread
    assert len(set(plan.positions) & at_hand) == min(wanted, len(at_hand & set(unread)))


def test_a_sample_is_fair_among_the_newest_and_leaves_out_what_is_old() -> None:
    unread = list(range(1, KEPT + 1))
    times = dict.fromkeys(unread, 0)
    for seed in range(2000):
        for seq in plan_intake(unread, 6, Random(seed)).positions:
            times[seq] += 1
    newest = unread[-max(SPREAD * 6, LEAST_SPREAD) :]
    assert sum(times[seq] for seq in newest) == 2000 * 6
    expected = 2000 * 6 / len(newest)
    assert all(0.7 * expected < times[seq] < 1.3 * expected for seq in newest)


def test_a_burst_is_used_over_several_turns() -> None:
    cursor, read = IntakeCursor(position=100), list[int]()
    for turn in range(10):
        unread = unread_positions(cursor, *((101, 150) if not turn else (0, 0)))
        plan = plan_intake(unread, 5, Random(turn))
        cursor, read = IntakeCursor(position=150, unread=list(plan.unread)), [*read, *plan.positions]
    assert sorted(read) == list(range(101, 151))


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 1000))
def test_what_is_kept_for_later_is_new_in_order_and_bounded(position: int, first_seq: int, messages: int) -> None:
    cursor = IntakeCursor(position=position, unread=[seq for seq in (1, 3) if seq <= position])
    unread = unread_positions(cursor, first_seq, first_seq + messages - 1)
    assert len(unread) <= KEPT and unread == sorted(set(unread))
    assert all(seq > position or seq in cursor.unread for seq in unread)


@given(st.lists(st.floats(-5.0, 50.0), max_size=60))
def test_the_bucket_never_gives_more_than_its_rate_and_burst(steps: list[float]) -> None:
    bucket, now_s, latest_s, taken = TokenBucket(3.0, 10.0, 0.0), 0.0, 0.0, 0
    for step in steps:
        now_s += step
        latest_s = max(latest_s, now_s)
        count = bucket.available(now_s)
        bucket.take(count)
        taken += count
    assert taken <= 10 + 3.0 * latest_s + 1e-6
