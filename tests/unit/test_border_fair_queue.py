"""Turns at intake: everybody's equal share, nobody's more than his, and what gives way when too
much waits.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.verifier.fair_queue import (
    BYTES_PER_TURN,
    MAX_SENDERS,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    NEWCOMER_SHARE,
    FairQueue,
    turns_of,
)


def served(arrivals_per_s: dict[str, float], rate_per_s: float, max_share: float, seconds: int = 60) -> Counter[str]:
    queue: FairQueue[int] = FairQueue(rate_per_s, max_share, 2.0, 0.0)
    taken: Counter[str] = Counter()
    owed = dict.fromkeys(arrivals_per_s, 0.0)
    for tick in range(seconds * 20):
        now_s = tick / 20
        for sender, rate in arrivals_per_s.items():
            owed[sender] += rate / 20
            while owed[sender] >= 1:
                owed[sender] -= 1
                queue.offer(sender, tick, 1000, now_s)
        while (found := queue.next(now_s)) is not None:
            taken[found[0]] += 1
    return taken


def test_a_flood_takes_nothing_from_others_within_their_share() -> None:
    calm = served({"beta": 4.0, "gamma": 4.0}, 20.0, 0.5)
    for flood in (40.0, 400.0):
        flooded = served({"beta": 4.0, "mallory": flood, "gamma": 4.0}, 20.0, 0.5)
        assert all(flooded[honest] >= calm[honest] - 1 for honest in ("beta", "gamma"))
        assert flooded["mallory"] <= 20.0 * 0.5 * 62 + 1, "and it is limited itself"


def test_what_all_want_is_split_equally_and_what_one_does_not_use_goes_to_the_others() -> None:
    taken = served({"beta": 100.0, "gamma": 100.0, "delta": 2.0}, 20.0, 1.0)
    assert abs(taken["beta"] - taken["gamma"]) <= 1
    assert taken["delta"] >= 118
    assert sum(taken.values()) >= 20 * 60


def test_one_sender_alone_gets_its_share_of_the_budget_and_no_more() -> None:
    taken = served({"beta": 100.0}, 20.0, 0.5)
    assert 600 <= taken["beta"] <= 620 + 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, MAX_WAITING_BYTES // 20), st.booleans()), max_size=400))
def test_room_is_bounded_every_message_leaves_once_and_in_its_senders_order(steps: list[tuple[int, int, bool]]) -> None:
    queue: FairQueue[int] = FairQueue(5.0, 1.0, 2.0, 0.0)
    out: dict[str, list[int]] = {}
    waiting_bytes: dict[int, int] = {}
    for number, (sender, size_bytes, serve) in enumerate(steps):
        waiting_bytes[number] = size_bytes
        gone = queue.offer(f"n{sender}", number, size_bytes, number / 10)
        if serve:
            may, found = queue.may_go_on(number / 10), queue.next(number / 10)
            assert may == (found is not None)
            gone += [found] if found else []
        for name, message in gone:
            out.setdefault(name, []).append(message)
            assert steps[message][0] == int(name[1:])
            del waiting_bytes[message]
        assert len(queue) == len(waiting_bytes) <= MAX_WAITING
        assert sum(waiting_bytes.values()) <= MAX_WAITING_BYTES or len(queue) == 1
    for messages in out.values():
        assert messages == sorted(set(messages))


def test_the_sender_that_takes_most_room_gives_way_not_the_newcomer() -> None:
    queue: FairQueue[str] = FairQueue(1.0, 1.0, 1.0, 0.0)
    for number in range(MAX_WAITING):
        assert queue.offer("mallory", f"m{number}", 10, 0.0) == []
    assert queue.offer("beta", "b", 10, 0.0) == [("mallory", "m0")]
    assert [queue.next(0.0), queue.next(1.0)] == [("mallory", "m1"), ("beta", "b")]


def test_forgeries_cost_their_victim_nothing_and_own_offences_only_the_sender() -> None:
    queue: FairQueue[int] = FairQueue(10.0, 0.5, 2.0, 0.0)
    for number in range(300):
        queue.offer("beta", number, 10, 0.0)
    for _ in range(100):
        assert queue.next(0.0) is not None, "given back each time"
        queue.refund("beta", blameless=True)
    for _ in range(10):
        assert queue.next(0.0) is not None
        queue.refund("beta", blameless=False)
    assert queue.next(0.0) is None, "beta's allowance is used up"
    for number in range(20):
        queue.offer(f"n{number}", number, 10, 0.0)
        assert queue.next(0.0) is not None, "everybody's is not"
    assert queue.next(0.0) is None


@pytest.mark.slow
def test_new_names_are_no_way_to_the_front_and_leave_no_trace() -> None:
    queue: FairQueue[int] = FairQueue(1e6, 1.0, 1.0, 0.0)
    queue.offer("beta", 0, 1, 0.0)
    queue.offer("new", 0, 1, 0.0)
    assert queue.next(0.0) == ("beta", 0)
    for number in range(3 * MAX_SENDERS):
        queue.offer(f"n{number}", number, 1, 0.0)
        queue.next(0.0)
    assert len(queue._senders) <= MAX_SENDERS


LARGE = 15 * BYTES_PER_TURN


def turns_taken(max_share: float, senders: dict[str, tuple[int, float]], *, seconds: int = 60) -> Counter[str]:
    """Turns that each of `senders` (size of its messages in bytes, what it has earned) takes of 20
    a second when all of them always have a message waiting.
    """
    queue: FairQueue[int] = FairQueue(20.0, max_share, 2.0, 0.0)
    taken: Counter[str] = Counter()
    for tick in range(seconds * 20):
        for name, (size_bytes, earned) in senders.items():
            queue.offer(name, tick, size_bytes, tick / 20, earned)
        while (found := queue.next(tick / 20)) is not None:
            taken[found[0]] += turns_of(senders[found[0]][0])
    return taken


def test_a_large_message_takes_turns_and_tokens_by_its_size() -> None:
    at_most = 20 * 62 + turns_of(LARGE)  # the burst, and the last one may be larger than what is left
    assert sum(turns_taken(0.5, {f"n{number}": (LARGE, 1.0) for number in range(10)}).values()) <= at_most, "of the budget"
    assert turns_taken(0.5, {"alone": (LARGE, 1.0)})["alone"] <= 10 * 62 + turns_of(LARGE), "of its own share"

    beside = turns_taken(1.0, {"large": (LARGE, 1.0), "small": (100, 1.0)})
    ahead = 20 * 2 + turns_of(LARGE)  # in the burst, for which who sends small ones has too few of them waiting
    assert abs(beside["large"] - beside["small"]) <= ahead, "as many turns as who sends small ones"

    beside = turns_taken(1.0, {"large": (LARGE, 1.0), "new": (100, 0.1)})
    assert abs(beside["new"] / beside.total() - NEWCOMER_SHARE) < 0.02, "and leaves newcomers their part"


def test_a_refund_gives_back_all_that_a_large_message_took() -> None:
    queue: FairQueue[int] = FairQueue(10.0, 1.0, 1.0, 0.0)
    for _ in range(10):
        queue.offer("victim", 1, LARGE, 0.0)
        assert queue.next(0.0) is not None, "the tokens"
        queue.refund("victim", blameless=True, size_bytes=LARGE)
    for number in range(10):
        queue.offer("victim", number, 100, 1.0)
        queue.offer("other", number, 100, 1.0)
    assert abs(Counter(found[0] for _ in range(8) if (found := queue.next(1.0)))["victim"] - 4) <= 1, "its own turns"

    queue = FairQueue(100.0, 1.0, 1.0, 0.0)
    for number in range(40):
        queue.offer("new", number, 100, 0.0, 0.1)
    for _ in range(5):
        queue.offer("victim", 1, LARGE, 0.0)
        while (found := queue.next(0.0)) and found[0] != "victim":
            pass
        queue.refund("victim", blameless=True, size_bytes=LARGE)
    for number in range(40):
        queue.offer("victim", number, 100, 1.0)
    served_now = Counter(found[0] for _ in range(20) if (found := queue.next(1.0)))
    assert abs(served_now["new"] / 20 - NEWCOMER_SHARE) <= 0.1, "and those of who has earned a share"


def test_what_waits_under_a_name_goes_on_waiting_under_the_key_that_has_the_name_now_and_loses_nothing() -> None:
    queue: FairQueue[int] = FairQueue(20.0, 0.5, 2.0, 0.0)
    dropped = [queue.offer("name", number, 1000, 0.0, 0.1) for number in range(3)]
    dropped += [queue.offer("beta", 9, 1000, 0.0, 0.1), queue.offer("key", 3, 1000, 0.0)]
    queue.move("name", "key", 0.0)
    queue.move("name", "key", 0.0)
    queue.move("nobody", "other", 0.0)
    assert len(queue) == 5
    taken = [queue.next(0.0) for _ in range(5)]
    assert [found for found in taken if found and found[0] == "key"] == [("key", number) for number in range(4)], "in their order"
    assert ("beta", 9) in taken
    assert not any(dropped)
    assert not len(queue)


def test_a_key_without_tokens_pays_later_only_for_what_it_may_take_on_credit() -> None:
    queue: FairQueue[int] = FairQueue(20.0, 0.5, 2.0, 0.0)
    assert queue.charge("key", 0.0, size_bytes=20 * BYTES_PER_TURN)
    assert not queue.charge("key", 0.0)
    assert queue.charge("key", 0.0, on_credit=True)
    queue.offer("key", 0, 0, 0.0)
    assert queue.next(0.2) is None, "two turns are owed, which take 0.2 s, and the next takes one"
    assert queue.next(0.35) == ("key", 0)
