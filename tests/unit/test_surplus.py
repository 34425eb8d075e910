"""A fast honest node and a flood are told apart: by what the sender has earned."""

from __future__ import annotations

import pytest

from services.verifier.checks import CHECKS
from services.verifier.fair_queue import MAX_WAITING, FairQueue
from services.verifier.foreign_groups import BURST_S
from services.verifier.refusals import BLAME, Refusal, beyond_budget
from shared.config import NodeConfig


def test_what_a_sender_in_good_standing_makes_beyond_the_budget_is_surplus_and_a_strangers_is_flood() -> None:
    earned = {"fast": 1.0, "stranger": 0.1}
    queue: FairQueue[int] = FairQueue(20.0, 0.5, 2.0, 0.0)
    lost = [
        name
        for number in range(MAX_WAITING)
        for sender, share in earned.items()
        for name, _ in queue.offer(sender, number, 100, 0.0, share)
    ]
    reasons = {name: beyond_budget(earned[name]) for name in lost}
    assert reasons == {"fast": Refusal.SURPLUS, "stranger": Refusal.FLOOD}


def test_what_was_in_the_stream_before_a_node_joined_is_no_flood_although_it_knows_nobody() -> None:
    assert beyond_budget(0.0, backlog=True) is Refusal.SURPLUS
    assert beyond_budget(0.0) is Refusal.FLOOD


def test_surplus_is_nobodys_fault_and_a_check_of_the_border_like_the_others() -> None:
    assert Refusal.SURPLUS not in BLAME
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
