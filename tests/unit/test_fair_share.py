"""Time in the scorers is dealt out by sender: property tests of the queue."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tasks.sandbox.foreign import FairShare


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 5.0), min_size=2), st.integers(50, 200))
def test_senders_that_always_want_more_get_the_same_time_whatever_their_groups_cost(costs: dict[str, float], turns: int) -> None:
    share: FairShare[str] = FairShare()
    spent: Counter[str] = Counter()
    for sender in costs:
        share.offer(sender, sender)
    for _ in range(turns):
        found = share.next()
        assert found is not None
        sender, item = found
        assert item == sender
        share.offer(sender, sender)
        share.settle(sender, costs[sender])
        spent[sender] += costs[sender]  # type: ignore[assignment]
    assert max(spent.values()) - min(spent[sender] for sender in costs) <= 2 * max(costs.values()) + 1e-6


def test_a_sender_that_was_silent_or_is_new_saves_nothing_up() -> None:
    share: FairShare[int] = FairShare()
    for number in range(20):
        share.offer("old", number)
        assert share.next() == ("old", number)
        share.settle("old", 1.0)
    share.offer("old", 20)
    for number in range(3):
        share.offer("new", number)
    order = []
    for _ in range(4):
        found = share.next()
        assert found is not None
        order.append(found[0])
        share.settle(found[0], 1.0)
    assert order in (["new", "old", "new", "new"], ["new", "new", "old", "new"])


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["offer", "serve", "drop"])), max_size=60))
def test_nothing_is_lost_or_served_twice_and_memory_goes_with_the_senders(steps: list[tuple[str, str]]) -> None:
    share: FairShare[int] = FairShare()
    waiting: dict[str, list[int]] = {}
    for number, (sender, step) in enumerate(steps):
        if step == "offer":
            share.offer(sender, number)
            waiting.setdefault(sender, []).append(number)
        elif step == "drop":
            assert share.drop(sender) == waiting.pop(sender, [])
        elif (found := share.next()) is not None:
            assert found[1] == waiting[found[0]].pop(0), "a sender's groups are served in order"
            share.settle(found[0], 1.0)
    assert len(share) == sum(map(len, waiting.values()))
    assert set(share) == {sender for sender, items in waiting.items() if items}


def test_with_one_in_service_a_sender_comes_after_those_without() -> None:
    share: FairShare[int] = FairShare()
    for number in range(3):
        share.offer("slow", number)
    assert share.next() == ("slow", 0)
    share.offer("quick", 0)
    assert share.next() == ("quick", 0)
    assert share.next() == ("slow", 1), "and nobody waits for a process that is free"
