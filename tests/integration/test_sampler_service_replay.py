"""The sampler service on a real NATS server, told to replay groups: the same ones after each kill,
none that is gone from the stream, and what may be replayed is not purged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import structlog
from prometheus_client import generate_latest

from shared.contracts.subjects import node_scored_stream
from tests.integration.sampler_node import a_node, until
from tests.nats_server import NatsServer, delete_message


async def test_killed_again_and_again_a_sampler_replays_the_same_groups(nats_server: Callable[..., NatsServer]) -> None:
    logs, steps = [], 9
    for kills in (False, True):
        async with a_node(nats_server().url, "alpha", replay=3, replay_batches=3, prefetch=2) as node:
            for number in range(1, steps + 1):
                await node.publish(10 * number, version=number - 1)
                await node.publish(10 * number + 1, version=number - 1, rewards=(1.0, 1.0) if number % 3 else (0.0, 1.0))
                await node.publish_external(10 * number, 10 * number + 1)
                await node.settle(node.scored_so_far)
                if number == 1 or (kills and number % 2 == 0):
                    node.start()
                await node.train_to(number - 1)
                await node.batches(number)
                if kills and number % 2 == 1:
                    await node.kill()
            logs.append(await node.raw_batches())
            shown = generate_latest(node.context.registry).decode()
            batches = await node.batches(steps)
    assert logs[0] == logs[1] and len(logs[0]) == steps
    first: dict[str, int] = {}
    for batch in batches:
        new, again = ([item for item in batch.items if item.replayed == replayed] for replayed in (False, True))
        assert len(new) == 4
        could = {group_id for group_id, number in first.items() if number >= batch.number - 3}
        assert {item.scored.group_id for item in again} <= could and len(again) == min(3, len(could))
        local = [item for item in new if item.scored.origin == "local"]
        first |= {item.scored.group_id: batch.number for item in local if len(set(item.scored.rewards)) > 1}
    last = batches[-1]
    assert max(item.staleness or 0 for item in last.items) > 1, "beyond max_staleness"
    assert (last.state.consumed_local, last.state.dropped_local) == (2 * steps, 0)
    assert "swarm_sampler_replayed_groups_total" in shown
    # The last life of the killed sampler built batches 8 and 9, with two new local groups and three
    # replayed ones each.
    assert "swarm_sampler_replayed_groups_total 6.0" in shown
    assert 'swarm_sample_source_total{source="local"} 4.0' in shown


async def test_a_replayable_group_that_is_gone_from_the_stream_is_left_out_and_the_sampler_goes_on(nats_url: str) -> None:
    async with a_node(nats_url, external=0, replay=4) as node:
        node.start()
        await node.publish(0, 1)
        await node.batches(1)
        await delete_message(node.transport, node_scored_stream(node.id), 1)
        with structlog.testing.capture_logs() as said:
            await node.publish(2, 3, version=1)
            await node.train_to(1)
            second = (await node.batches(2))[1]
        assert [(item.scored.group.draw, item.replayed) for item in second.items] == [(2, False), (3, False), (1, True)]
        assert second.state.dropped_local == 0
        assert [line["log_level"] for line in said if line["event"] == "replayable_group_gone"] == ["info"]
        await node.kill()
        node.start()
        await node.publish(4, 5, version=2)
        await node.train_to(2)
        third = (await node.batches(3))[2]
        assert [item.scored.group.draw for item in third.items] == [4, 5, 1, 2, 3]


async def test_what_may_be_replayed_stays_in_the_stream_and_the_rest_is_purged(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.sampler.memory.DUPLICATE_POSITIONS", 1)
    monkeypatch.setattr("services.sampler.service._PURGE_EVERY_S", 0.0)
    async with a_node(nats_url, external=0, replay=4, replay_batches=2) as node:
        node.start()
        for number in range(1, 6):
            await node.publish(2 * number, 2 * number + 1, version=number - 1)
            await node.train_to(number - 1)
            await node.batches(number)

        async def purged() -> bool:
            return (await node.transport.stream_state(node_scored_stream(node.id))).first_seq == 7

        # Batch 6 may have what was new in batches 4 and 5: positions 7 to 10.
        await until(purged)
        await asyncio.sleep(0.2)
        assert await purged()
        await node.kill()
        node.start()
        await node.publish(100, 101, version=5)
        await node.train_to(5)
        sixth = (await node.batches(6))[5]
        assert [item.scored.group.draw for item in sixth.items] == [100, 101, 8, 9, 10, 11]
