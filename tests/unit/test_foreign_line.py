"""Who is scored next and who gives way: dear groups, many keys and newcomers against a cheap sender
and an established one.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.verifier.fair_queue import IN_WORK, IN_WORK_PER_SENDER, InFlightLimit
from shared.tasks.sandbox.foreign import MAX_WAITING, MAX_WAITING_BYTES, ForeignLine

PART = 0.25
MIB = 2**20


def serve(line: ForeignLine[str], seconds: dict[str, float], usual_s: float, *, established: set[str]) -> str:
    found = line.next()
    assert found is not None
    line.settle(found[0], seconds.get(found[0], usual_s), established=found[0] in established)
    return found[0]


def test_what_waits_for_the_scorers_takes_nobodys_place_and_all_that_is_taken_is_given_back() -> None:
    places = InFlightLimit()
    for sender in range(IN_WORK // IN_WORK_PER_SENDER):
        for _ in range(IN_WORK_PER_SENDER):
            assert places.free and places.fits()(f"dear{sender}", 4 * MIB if sender < 4 else 100)
            places.take(f"dear{sender}", 4 * MIB if sender < 4 else 100)
    assert not places.free
    with places.lent("dear0", 4 * MIB):
        assert places.free and places.fits()("cheap", 4 * MIB)
        assert not places.fits()("dear0", 100), "its sender has as many in work as before"
    assert not places.free and not places.fits()("cheap", 4 * MIB)
    places.leave("dear0", 4 * MIB)
    assert places.free and places.fits()("dear0", 4 * MIB)


def test_a_cheap_sender_finds_room_and_is_served_next_however_many_dear_ones_wait() -> None:
    line: ForeignLine[str] = ForeignLine(PART)
    dear = {f"dear{number}": 5.0 for number in range(100)}
    for sender in [*dear] * 2:
        line.offer(sender, sender, 100, established=False)
    for turn in range(20):
        while len(line) < MAX_WAITING:
            line.offer(f"dear{(7 * turn + len(line)) % 100}", "dear", 100, established=False)
        lost = line.offer("cheap", "cheap", 100, established=False)
        assert len(lost) == 1 and lost != ["cheap"]
        waited = 0
        while serve(line, dear, 0.01, established=set()) != "cheap":
            waited += 1
        assert waited <= len(dear), "at most one group of each"


def test_ever_new_keys_crowd_no_established_sender_out_and_take_their_part_of_the_time() -> None:
    line: ForeignLine[str] = ForeignLine(PART)
    spent: Counter[bool] = Counter()
    waiting = 0
    for number in range(3000):
        assert "old" not in line.offer(f"new{number}", "new", 100, established=False)
        while waiting < IN_WORK_PER_SENDER:
            assert "old" not in line.offer("old", "old", 100, established=True)
            waiting += 1
        if number > MAX_WAITING:
            is_old = serve(line, {}, 0.4, established={"old"}) == "old"
            waiting -= is_old
            spent[is_old] += 1
    assert abs(spent[False] / spent.total() - PART) < 0.02
    alone: ForeignLine[str] = ForeignLine(PART)
    for number in range(10):
        alone.offer(f"new{number}", "new", 100, established=False)
    assert [serve(alone, {}, 0.4, established=set()) for _ in range(10)] == [f"new{number}" for number in range(10)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"), st.sampled_from(["offer", "offer", "serve", "drop", "back"]), st.integers(0, 16 * MIB)
        ),
        max_size=200,
    )
)
def test_what_waits_is_bounded_in_groups_and_bytes_and_nothing_is_lost_without_a_word(steps: list[tuple[str, str, int]]) -> None:
    line: ForeignLine[int] = ForeignLine(PART)
    waiting: dict[int, int] = {}
    for number, (sender, step, size_bytes) in enumerate(steps):
        established = sender in "abc"
        if step == "offer":
            waiting[number] = size_bytes
            for lost in line.offer(sender, number, size_bytes, established=established):
                del waiting[lost]
        elif step == "drop":
            for dropped in line.drop(sender):
                del waiting[dropped]
        elif (found := line.next()) is not None:
            owner, item = found
            if step == "back":
                line.put_back(owner, item, waiting[item], established=owner in "abc")
            else:
                del waiting[item]
            line.settle(owner, 0.1, established=owner in "abc")
        assert len(line) == len(waiting) <= MAX_WAITING
        assert sum(waiting.values()) <= MAX_WAITING_BYTES or len(waiting) == 1
    while (found := line.next()) is not None:
        del waiting[found[1]]
        line.settle(found[0], 0.1, established=found[0] in "abc")
    assert not waiting
