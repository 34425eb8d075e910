"""A fast honest node and a flood are told apart: by what the sender has earned."""

from __future__ import annotations

from services.verifier.checks import CHECKS
from services.verifier.fair_queue import MAX_WAITING, FairQueue
from services.verifier.refusals import BLAME, Refusal, beyond_budget


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
