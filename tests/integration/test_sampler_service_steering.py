"""The sampler service on a real NATS server while J moves with what it sees: the same
batches after each kill, and J halved where a dataset is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tests.integration.sampler_node import a_node
from tests.nats_server import NatsServer


async def test_killed_again_and_again_a_sampler_that_learns_and_adapts_builds_the_same_batches(
    nats_server: Callable[..., NatsServer],
) -> None:
    """J moves here with what the node's local groups and held-out results show; its state travels
    in the newest batch.
    """
    moving = {
        "strategy": "learnability", "adapt": "adaptive", "adapt_period": 2,
        "local": 2, "external": 2, "max_staleness": 3, "shortage_wait_s": 0.0,
    }  # fmt: skip
    logs, steps = [], 14
    for kills in (False, True):
        async with a_node(nats_server().url, "alpha", **moving) as node:
            for number in range(1, steps + 1):
                # First local groups teach and J falls, then they do not and J comes back; their
                # mean reward stays.
                rewards = (0.0, 1.0) if number <= 6 else (0.5, 0.5)
                await node.publish(*range(10 * number, 10 * number + 4), version=number - 1, rewards=rewards)
                await node.publish_external(*range(10 * number, 10 * number + 4))
                if number % 4 == 0:
                    await node.evaluate(number, gcd=0.1 + 0.02 * number, lcm=0.2)
                await node.settle(node.scored_so_far)
                if kills and number % 3 == 0:
                    await node.kill()
                if number == 1 or (kills and number % 3 == 0):
                    node.start()
                await node.train_to(number - 1)
                await node.batches(number)
            logs.append(await node.raw_batches())
            batches = await node.batches(steps)
            told = await node.reported()
            assert told is not None and told.local is not None
            assert told.local + node.context.status.get("wanted_external") == 4
    assert logs[0] == logs[1]
    moved = [batch.wanted_external for batch in batches]
    assert moved[0] == 2 and 0 in moved[:8] and max(moved[8:]) > 0, moved
    assert all(batch.wanted_local + batch.wanted_external == 4 for batch in batches)
    assert {batch.strategy.split(",")[0] for batch in batches} == {"learnability"}
    last = batches[-1].state
    assert last.sharing is not None and last.sharing.external == 2, "J has come back"
    assert [(level.dataset, level.rate) for level in last.sharing.datasets] == [("gcd", 0.1 + 0.02 * 12), ("lcm", 0.2)]
    assert last.own.groups == 4 * steps and last.sharing is not None and last.sharing.held_out_version == 12
    # Each place of a foreign group has up to two spare candidates.
    assert all(4 <= len(batch.items) <= batch.wanted_local + 3 * batch.wanted_external for batch in batches)


async def test_a_dataset_that_is_forgotten_while_another_is_learnt_halves_j_and_the_log_names_it(nats_url: str) -> None:
    moving = {"adapt": "adaptive", "adapt_period": 1, "local": 2, "external": 2, "max_staleness": 3, "shortage_wait_s": 0.0}
    with structlog.testing.capture_logs() as said:
        async with a_node(nats_url, **moving) as node:
            for number, (gcd, lcm) in enumerate([(0.9, 0.2), (0.9, 0.5), (0.3, 0.9)], start=1):
                await node.publish(*range(10 * number, 10 * number + 4), version=number - 1, rewards=(0.5, 0.5))
                await node.publish_external(*range(10 * number, 10 * number + 4))
                await node.evaluate(number, gcd=gcd, lcm=lcm)
                await node.settle(node.scored_so_far)
                if number == 1:
                    node.start()
                await node.train_to(number - 1)
                batches = await node.batches(number)
    assert [batch.wanted_external for batch in batches] == [2, 2, 2]
    assert batches[-1].state.sharing is not None and batches[-1].state.sharing.external == 1
    [move] = [line for line in said if line["event"] == "shares_moved"]
    assert (move["external"], move["why"]) == (1, "held-out pass rate of gcd fell: J halved")
