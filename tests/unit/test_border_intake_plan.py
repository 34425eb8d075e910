"""The intake's budget and choice of messages."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.verifier.fair_queue import TokenBucket
from services.verifier.swarm_reader import CATCH_UP_S, plan_intake

SEQ = st.integers(0, 10_000)


@given(SEQ, st.integers(1, 10_000), st.integers(0, 10_000), st.integers(0, 100), st.floats(0.1, 100.0), st.integers())
def test_no_more_is_looked_at_than_allowed_and_the_cursor_stays_in_the_stream(
    cursor: int, first_seq: int, length: int, allowed: int, rate_per_s: float, seed: int
) -> None:
    last_seq = first_seq + length - 1
    plan = plan_intake(
        cursor=cursor, first_seq=first_seq, last_seq=last_seq, allowed=allowed, rate_per_s=rate_per_s, random=Random(seed)
    )
    assert plan.next_cursor <= max(cursor, last_seq)
    if plan.mode == "draw":
        assert plan.next_cursor == last_seq
        assert len(set(plan.positions)) == len(plan.positions) <= allowed
        assert all(first_seq <= position <= last_seq for position in plan.positions)
    elif plan.mode == "follow":
        start = max(cursor + 1 if cursor <= last_seq else 1, first_seq)
        assert 1 <= plan.next_cursor - start + 1 <= allowed
    if allowed == 0:
        assert plan.mode == "idle"


def test_a_small_backlog_is_followed_and_a_large_one_sampled_over_the_whole_window() -> None:
    rate_per_s = 20.0
    few = plan_intake(cursor=90, first_seq=1, last_seq=100, allowed=40, rate_per_s=rate_per_s, random=Random(0))
    assert (few.mode, few.next_cursor) == ("follow", 100)
    far = int(rate_per_s * CATCH_UP_S) + 91
    many = plan_intake(cursor=90, first_seq=1, last_seq=far, allowed=40, rate_per_s=rate_per_s, random=Random(0))
    assert many.mode == "draw"
    assert len(many.positions) == 40
    seen: set[int] = set()
    for seed in range(300):
        seen |= set(
            plan_intake(cursor=0, first_seq=1, last_seq=500, allowed=40, rate_per_s=rate_per_s, random=Random(seed)).positions
        )
    assert seen == set(range(1, 501))


def test_a_stream_made_anew_is_followed_from_its_start() -> None:
    plan = plan_intake(cursor=500, first_seq=1, last_seq=3, allowed=10, rate_per_s=1.0, random=Random(0))
    assert (plan.mode, plan.next_cursor) == ("follow", 3)


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
