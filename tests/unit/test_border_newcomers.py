"""What newcomers get of the intake: all while nobody else is there, a part together when everybody
wants it, never nothing.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.verifier.fair_queue import MAX_SENDERS, MAX_WAITING, NEWCOMER_SHARE, FairQueue
from services.verifier.reputation import ESTABLISHED, LEAST, LIMIT, TOLERATED, intake_share
from tests.long_forms import FULL

RATE_PER_S = 20.0
SECONDS = 60 if FULL else 30
NEW = intake_share(0, 0.0, 32)


def served(arrivals_per_s: dict[str, tuple[float, float]], seconds: int = SECONDS, rate_per_s: float = RATE_PER_S) -> Counter[str]:
    """Count how many of each sender's messages are served. A sender has a rate and an earned share;
    `*` sends under ever new names.
    """
    queue: FairQueue[str] = FairQueue(rate_per_s, 0.5, 2.0, 0.0)
    taken: Counter[str] = Counter()
    owed = dict.fromkeys(arrivals_per_s, 0.0)
    names = 0
    for tick in range(seconds * 20):
        now_s = tick / 20
        for sender, (rate, share) in arrivals_per_s.items():
            owed[sender] += rate / 20
            while owed[sender] >= 1:
                owed[sender] -= 1
                names += 1
                queue.offer(f"new-{names}" if sender == "*" else sender, sender, 1000, now_s, share)
        while (found := queue.next(now_s)) is not None:
            taken[found[1]] += 1
    return taken


def test_a_swarm_in_which_everybody_is_new_shares_at_full_speed() -> None:
    old = served({f"n{number}": (10.0, ESTABLISHED) for number in range(8)})
    new = served({f"n{number}": (10.0, NEW) for number in range(8)})
    assert new == old
    assert sum(new.values()) >= RATE_PER_S * SECONDS


@pytest.mark.slow
def test_ever_new_names_take_a_part_of_the_intake_and_established_senders_lose_nothing_within_the_rest() -> None:
    honest = {f"n{number}": (1.8, ESTABLISHED) for number in range(8)}
    calm, crowded = served(honest), served(honest | {"*": (140.0, NEW)})
    for node in honest:
        assert crowded[node] >= calm[node] - 2, (calm, crowded)
    assert crowded["*"] >= RATE_PER_S * SECONDS * NEWCOMER_SHARE * 0.9, "and are not locked out themselves"


@pytest.mark.slow
def test_all_want_everything_and_newcomers_together_get_their_part() -> None:
    taken = served({f"n{number}": (20.0, ESTABLISHED) for number in range(4)} | {"*": (100.0, NEW)})
    assert abs(taken["*"] / sum(taken.values()) - NEWCOMER_SHARE) < 0.05, taken


@pytest.mark.slow
def test_a_newcomer_with_a_few_good_groups_is_not_held_up_by_ever_new_names() -> None:
    busy = {f"n{number}": (20.0, ESTABLISHED) for number in range(4)} | {"*": (100.0, NEW)}
    taken = served(busy | {"young": (2.0, intake_share(15, 0.0, 32))})
    assert taken["young"] >= 2.0 * SECONDS * 0.9, taken


@pytest.mark.parametrize("blameless", [True, False])
def test_a_newcomers_messages_that_are_given_back_go_before_nobody_established(blameless: bool) -> None:
    queue: FairQueue[int] = FairQueue(RATE_PER_S, 0.5, 2.0, 0.0)
    for number in range(20):
        queue.offer("beta", number, 1000, 0.0, ESTABLISHED)
    for number in range(300):
        queue.offer("mallory", number, 1000, 0.0, NEW)
    served: list[str] = []
    for look in range(4000):
        if (found := queue.next(look / 500)) is not None:
            served.append(found[0])
            if found[0] == "mallory":
                queue.refund("mallory", blameless=blameless)  # a replay, say
    until_all = [place for place, name in enumerate(served) if name == "beta"][-1]
    assert served[: until_all + 1].count("mallory") <= 20 * NEWCOMER_SHARE / (1 - NEWCOMER_SHARE) + 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([NEW, 0.5, ESTABLISHED]), st.booleans()), max_size=900))
def test_messages_leave_once_whatever_becomes_of_a_senders_share_and_the_room_is_bounded(
    steps: list[tuple[int, float, bool]],
) -> None:
    queue: FairQueue[int] = FairQueue(50.0, 0.5, 2.0, 0.0)
    inside: set[int] = set()
    for number, (sender, share, serve) in enumerate(steps):
        now_s = number / 20
        inside.add(number)
        gone = [message for _, message in queue.offer(f"n{sender}", number, 100, now_s, share)]
        if serve and (found := queue.next(now_s)) is not None:
            gone.append(found[1])
            queue.refund(found[0], blameless=bool(number % 2))
        for message in gone:
            inside.remove(message)
        assert len(queue) == len(inside) <= MAX_WAITING
        assert sum(len(line.waiting) for line in queue._senders.values()) == len(queue)
        assert len(queue._senders) <= MAX_SENDERS


@pytest.mark.slow
def test_an_established_senders_room_is_not_taken_by_many_names_with_one_message_each() -> None:
    queue: FairQueue[str] = FairQueue(1.0, 0.5, 1.0, 0.0)
    for number in range(20):
        assert queue.offer("honest", f"h{number}", 10, 0.0) == []
    lost = [name for number in range(3 * MAX_WAITING) for name, _ in queue.offer(f"new-{number}", "x", 10, 0.0, NEW)]
    assert lost
    assert "honest" not in lost


@pytest.mark.slow
def test_names_of_nobody_do_not_multiply_the_share_of_the_key_behind_them() -> None:
    queue: FairQueue[int] = FairQueue(RATE_PER_S, 0.5, 2.0, 0.0)
    granted = 0
    for tick in range(20 * 30):
        now_s = tick / 20
        for number in range(5):
            queue.offer(f"name-{tick}-{number}", number, 10, now_s, NEW)
        while queue.next(now_s) is not None:
            granted += queue.charge("UKEY", now_s, NEW)
    assert granted <= RATE_PER_S * 0.5 * 32 + 1


@given(st.integers(0, 200), st.floats(0.0, LIMIT), st.integers(0, 100))
def test_a_share_grows_with_accepted_groups_falls_with_suspicion_and_is_never_nothing(
    accepted: int, suspicion: float, needed: int
) -> None:
    share = intake_share(accepted, suspicion, needed)
    assert LEAST <= share <= ESTABLISHED
    assert intake_share(accepted + 1, suspicion, needed) >= share
    assert intake_share(accepted, min(LIMIT, suspicion + 0.05), needed) <= share
    if accepted >= needed and suspicion <= TOLERATED:
        assert share == ESTABLISHED
    if accepted < needed:
        assert share < ESTABLISHED
