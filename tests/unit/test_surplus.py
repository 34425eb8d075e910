"""A fast honest node and a flood are told apart: by what the sender has earned."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from services.verifier.border import Refusal
from services.verifier.checks import CHECKS
from services.verifier.fair_queue import MAX_WAITING, FairQueue, SendingRates, beyond_budget
from services.verifier.swarm_reader import BURST_S
from shared.config import NodeConfig


def test_what_a_sender_in_good_standing_makes_beyond_the_budget_is_surplus_and_a_strangers_is_flood() -> None:
    earned = {"fast": 1.0, "stranger": 0.1}
    queue: FairQueue[int] = FairQueue(20.0, 0.5, 2.0, 0.0)
    lost = {
        name: beyond_budget(earned[name], exceeds=queue.exceeds(name))
        for number in range(MAX_WAITING)
        for sender, share in earned.items()
        for name, _ in queue.offer(sender, number, 100, 0.0, share)
    }
    assert lost == {"fast": Refusal.SURPLUS, "stranger": Refusal.FLOOD}


def refusals(senders: int, per_s: float, seconds: int, *, asleep_s: float = 0.0) -> Counter[Refusal]:
    """Return what the default settings refuse of newcomers that each send `per_s`, by reason.
    `asleep_s`: how long this node reads nothing at the start, after which all that is stored comes
    at once.
    """
    verifier = NodeConfig(tasks=[{"dataset": "gcd"}]).verifier
    queue: FairQueue[int] = FairQueue(verifier.intake_groups_per_s, verifier.max_sender_share, BURST_S, 0.0)
    numbers = range(round(seconds * per_s))
    stored = sorted((number / per_s + sender / senders / per_s, f"new{sender}") for sender in range(senders) for number in numbers)
    found: Counter[Refusal] = Counter()
    for sent_at, sender in stored:
        now_s = max(sent_at, asleep_s)
        lost = queue.offer(sender, 0, 4096, now_s, 1 / 17, sent_at=1e9 + sent_at)
        found.update(beyond_budget(1 / 17, exceeds=queue.exceeds(name)) for name, _ in lost)
        while queue.next(now_s) is not None:
            pass
    return found


def test_many_newcomers_that_each_send_little_are_no_flood_although_together_they_are_too_many() -> None:
    found = refusals(senders=200, per_s=0.5, seconds=60)
    assert found[Refusal.SURPLUS] > 300 and not found[Refusal.FLOOD]


def test_a_node_that_was_short_of_time_finds_no_flood_in_what_waited_for_it() -> None:
    found = refusals(senders=4, per_s=5.0, seconds=120, asleep_s=60.0)
    assert found[Refusal.SURPLUS] > 300 and not found[Refusal.FLOOD]


def test_one_newcomer_that_sends_ten_times_what_it_may_is_a_flood() -> None:
    found = refusals(senders=1, per_s=100.0, seconds=60)
    assert found.total() > 3000 and found[Refusal.FLOOD] > 0.8 * found.total()


def flood_per_s(rates: dict[str, float], read: int, every_s: float = 10.0, seconds: float = 240.0) -> float:
    """Return what a node that reads `read` of the newest messages each `every_s` says of newcomers
    that send at these rates; a name with "known" has earned its place.
    """
    found, random, begun = SendingRates(10.0), Random(0), 0
    stored = sorted((random.uniform(0, seconds), sender) for sender, per_s in rates.items() for _ in range(int(seconds * per_s)))
    for look in range(1, int(seconds / every_s) + 1):
        news = [place for place in range(begun, len(stored)) if stored[place][0] <= look * every_s]
        begun = news[-1] + 1 if news else begun
        newest = news[-max(4 * read, 32) :]
        for place in sorted(random.sample(newest, min(read, len(newest)))):
            found.add(stored[place][1], place + 1, 1e9 + stored[place][0], newcomer="known" not in stored[place][1])
    return found.flood_per_s(1e9 + seconds)


def test_a_flood_is_told_by_its_rate_though_a_node_reads_few_of_its_messages() -> None:
    honest = {f"new{number}": 0.2 for number in range(20)}
    assert flood_per_s({**honest, "mallory": 100.0}, read=6) == pytest.approx(100.0, rel=0.3)
    assert flood_per_s({**honest, "mallory": 100.0, "eve": 50.0}, read=6) == pytest.approx(150.0, rel=0.3)
    assert flood_per_s({**honest, "mallory": 100.0}, read=1, seconds=100.0) > 50.0, "six messages are enough"
    assert flood_per_s({**honest, "mallory": 100.0}, read=0) == 0.0


def test_many_newcomers_bursts_and_a_fast_known_sender_are_no_flood_of_the_stream() -> None:
    assert flood_per_s({f"new{number}": 0.5 for number in range(400)}, read=30) == 0.0
    assert flood_per_s({"known": 60.0, "new": 2.0}, read=30) == 0.0
    burst = SendingRates(10.0)
    for seq in range(1, 81):
        burst.add("new", seq, 1e9 + seq / 80, newcomer=True)
    assert burst.flood_per_s(1e9 + 1.0) == 0.0


def test_what_was_in_the_stream_before_a_node_joined_is_no_flood_although_it_knows_nobody() -> None:
    assert beyond_budget(0.0, exceeds=True, backlog=True) is Refusal.SURPLUS
    assert beyond_budget(0.0, exceeds=True) is Refusal.FLOOD


def test_surplus_is_nobodys_fault_and_a_check_of_the_border_like_the_others() -> None:
    assert not Refusal.SURPLUS.blame
    (check,) = [check for check in CHECKS if check.refusal is Refusal.SURPLUS]
    assert check.blamed == "nobody"


@pytest.mark.slow
def test_a_node_that_makes_twice_what_one_sender_may_send_has_half_refused_as_surplus() -> None:
    """With the default settings, an hour of an established sender of 20 groups a second."""
    verifier = NodeConfig(tasks=[{"dataset": "gcd"}]).verifier
    queue: FairQueue[int] = FairQueue(verifier.intake_groups_per_s, verifier.max_sender_share, BURST_S, 0.0)
    per_s, hour_s = 20, 3600
    taken, lost, waited_s = 0, 0, 0.0
    for number in range(hour_s * per_s):
        now_s = number / per_s
        lost += len(queue.offer("fast", number, 4096, now_s))
        while (found := queue.next(now_s)) is not None:
            taken += 1
            waited_s = max(waited_s, now_s - found[1] / per_s)
    made = hour_s * per_s
    assert 0.49 < taken / made < 0.52 and 0.47 < lost / made < 0.5
    assert 20 < waited_s < 30, "the oldest of those that wait are refused, so that what is taken is not old"


def test_a_node_that_makes_less_than_one_sender_may_send_has_nothing_refused() -> None:
    queue: FairQueue[int] = FairQueue(20.0, 0.5, BURST_S, 0.0)
    lost = 0
    for number in range(3600 * 9):
        lost += len(queue.offer("usual", number, 4096, number / 9))
        while queue.next(number / 9) is not None:
            pass
    assert lost == 0
