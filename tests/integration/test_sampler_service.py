"""The sampler service against a real NATS server, through its own streams."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from services.sampler.service import SamplerService
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, SamplerPosition, TaskScore, TrainerPosition
from shared.contracts.messages import Batch
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import (
    EVAL_KEY,
    SAMPLER_KEY,
    TRAINER_KEY,
    node_batches_stream,
    node_bucket,
    node_scored,
    node_scored_stream,
)
from shared.runtime import ServiceContext
from shared.runtime.status import StatusBoard
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.nats_server import NatsServer
from tests.unit.sampler_groups import scored_group

DEADLINE_S = 180.0


def still_clock() -> float:
    return 1000.0


def configured(node: str, **sampler: Any) -> NodeConfig:
    # uniform: what a batch holds is what is trained on, not candidates of which the trainer
    # chooses.
    chosen = {"local": 2, "external": 2, "strategy": "uniform", "adapt": "off", "shortage_wait_s": 0.2, **sampler}
    return NodeConfig(node={"id": node}, tasks=[{"dataset": "chain_sum"}], sampler=chosen)  # type: ignore[arg-type]


class Node:
    """One node's plane, with a sampler that can be started, stopped and killed."""

    def __init__(self, transport: Transport, config: NodeConfig, clock: Callable[[], float] = still_clock) -> None:
        self.transport, self.config, self.clock = transport, config, clock
        self.id = config.node.id
        self._task: asyncio.Task[None] | None = None
        self.scored_so_far = 0

    def start(self) -> ServiceContext:
        self.context = ServiceContext(
            config=self.config,
            role="sampler",
            replica="test",
            node=self.transport,
            swarm=None,
            log=structlog.get_logger("test"),
            registry=CollectorRegistry(),
            status=StatusBoard(self.id, "sampler", "test"),
            stopping=asyncio.Event(),
        )
        self._task = asyncio.create_task(SamplerService(self.config, self.clock).run(self.context))
        return self.context

    async def stop(self) -> None:
        assert self._task is not None
        self.context.stopping.set()
        await asyncio.wait_for(self._task, 4.0)

    async def kill(self) -> None:
        await cancel_and_wait(self._task)

    async def publish(self, *draws: int, **settings: Any) -> None:
        for draw in draws:
            scored = scored_group(draw, **{"node": self.id, **settings})
            await self.transport.publish(
                node_scored(self.id), encode(scored), stream=node_scored_stream(self.id), message_id=scored.group_id
            )

            self.scored_so_far += 1

    async def publish_external(self, *draws: int, **settings: Any) -> None:
        await self.publish(*draws, node="beta", origin="external", **settings)

    async def train_to(self, number: int) -> None:
        position = TrainerPosition(policy_version=number, consumed_local=0)
        await self.transport.kv.put(node_bucket(self.id), TRAINER_KEY, encode(position))

    async def evaluate(self, version: int, **datasets: float) -> None:
        """A held-out result, known to the sampler before anything that is published afterwards is
        used.

        datasets: pass rates of 50 questions each.
        """
        rate = sum(datasets.values()) / len(datasets)
        report = EvalReport(
            node=self.id,
            policy_version=version,
            created_at=1.0,
            n=50 * len(datasets),
            pass_rate=rate,
            mean_reward=rate,
            per_task={name: TaskScore(n=50, pass_rate=passed, mean_reward=passed) for name, passed in datasets.items()},
            seconds=1.0,
        )
        await self.transport.kv.put(node_bucket(self.id), EVAL_KEY, encode(report))
        await asyncio.sleep(0.7)  # longer than the poll behind the watch

    async def settle(self, groups: int) -> None:
        """Until all groups published so far are consumed, dropped or in a pool."""

        async def read() -> bool:
            return (await self.transport.stream_state(node_scored_stream(self.id))).last_seq >= groups

        await until(read)
        await asyncio.sleep(0.1)

    async def raw_batches(self) -> list[bytes]:
        messages = await self.transport.read(node_batches_stream(self.id), 1, 1000)
        return [await self.transport.payload(message) for message in messages]

    async def batches(self, at_least: int) -> list[Batch]:
        found: list[Batch] = []

        async def enough() -> bool:
            nonlocal found
            found = [decode(raw, Batch) for raw in await self.raw_batches()]
            return len(found) >= at_least

        await until(enough)
        return found

    async def reported(self) -> SamplerPosition | None:
        entry = await self.transport.kv.get(node_bucket(self.id), SAMPLER_KEY)
        return None if entry is None else decode(entry.value, SamplerPosition)


async def until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline, "not reached in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def a_node(url: str, node_id: str = "", clock: Callable[[], float] = still_clock, **sampler: Any) -> AsyncIterator[Node]:
    name = node_id or f"s{secrets.token_hex(4)}"
    transport = await connect(url, name=name)
    try:
        await ensure_node_streams(transport, name)
        node = Node(transport, configured(name, **sampler), clock)
        yield node
        if node._task is not None and not node._task.done():
            await node.stop()
    finally:
        await transport.close()


async def test_a_batch_is_built_when_groups_are_there_and_the_next_when_the_trainer_comes_near(nats_url: str) -> None:
    async with a_node(nats_url) as node:
        node.start()
        await node.publish(0, 1, 2, 3)
        await node.publish_external(0, 1, 2, 3)
        [first] = await node.batches(1)
        assert (first.number, first.shortage, first.strategy) == (1, "none", "uniform")
        assert [item.scored.group.draw for item in first.items[:2]] == [0, 1]
        assert [item.scored.origin for item in first.items] == ["local", "local", "external", "external"]
        await asyncio.sleep(0.3)
        assert len(await node.raw_batches()) == 1
        await node.train_to(1)
        second = (await node.batches(2))[1]
        assert [item.scored.group.draw for item in second.items[:2]] == [2, 3]
        assert second.items[0].staleness == 1


async def test_an_appended_batch_follows_the_trainers_news_within_a_fraction_of_a_step(nats_url: str) -> None:
    async with a_node(nats_url, external=0, prefetch=1) as node:
        node.start()
        await node.publish(*range(4))
        await node.batches(1)
        delays = []
        for number in range(1, 12):
            await node.publish(2 * number + 2, 2 * number + 3, version=number)
            await asyncio.sleep(0.15)
            started = time.perf_counter()
            await node.train_to(number)
            await node.batches(number + 1)
            delays.append(time.perf_counter() - started)
        assert sorted(delays)[len(delays) // 2] < 0.1, delays


async def test_killed_at_any_moment_the_sampler_goes_on_where_it_was(nats_url: str) -> None:
    async with a_node(nats_url, prefetch=8, max_staleness=20) as node:
        for round_ in range(8):
            node.start()
            await node.publish(*range(4 * round_, 4 * round_ + 4))
            await node.publish_external(*range(4 * round_, 4 * round_ + 4))
            await node.train_to(round_)
            await asyncio.sleep(0.02 * round_)
            await node.kill()
        node.start()
        batches = await node.batches(15)
        assert [batch.number for batch in batches] == list(range(1, len(batches) + 1))
        used = [item.scored.group_id for batch in batches for item in batch.items]
        assert len(used) == len(set(used))


async def test_two_samplers_at_once_append_one_log_without_a_group_used_twice(nats_url: str) -> None:
    async with a_node(nats_url, prefetch=64, max_staleness=64) as node:
        other = Node(node.transport, node.config)
        node.start()
        other.start()
        for draw in range(40):
            await node.publish(draw)
            await node.publish_external(draw)
        batches = await node.batches(20)
        await other.stop()
        assert [batch.number for batch in batches] == list(range(1, len(batches) + 1))
        used = [item.scored.group_id for batch in batches for item in batch.items]
        assert len(used) == len(set(used))


async def test_the_same_scored_stream_and_trainer_positions_give_identical_batches(
    nats_server: Callable[..., NatsServer],
) -> None:
    logs = []
    for _ in range(2):
        async with a_node(nats_server().url, "alpha") as node:
            for draw in range(20):
                await node.publish(draw, version=draw // 2)
                await node.publish_external(draw, rewards=(0.0, 1.0) if draw % 3 else (1.0, 1.0))
            node.start()
            for number in range(1, 6):
                await node.batches(number)
                await node.train_to(number)
            await node.batches(6)
            logs.append(await node.raw_batches())
    assert len(logs[0]) == 6
    assert logs[0] == logs[1]


async def test_the_generator_learns_at_once_of_groups_that_will_never_be_trained_on(nats_url: str) -> None:
    async with a_node(nats_url) as node:
        node.start()
        await node.publish(0, failure="the scorer was killed three times")

        async def told() -> bool:
            position = await node.reported()
            return position is not None and position.dropped_local == 1

        await until(told)
        assert node.context.status.get("dropped_local") == 1
        assert (
            'swarm_sampler_dropped_groups_total{origin="local",reason="failed"} 1.0'
            in generate_latest(node.context.registry).decode()
        )


async def test_without_other_nodes_groups_it_fills_up_with_its_own(nats_url: str) -> None:
    async with a_node(nats_url, clock=time.time) as node:
        node.start()
        await node.publish(0, 1, 2)
        [batch] = await node.batches(1)
        assert (batch.shortage, len(batch.items), batch.wanted_external) == ("fill_local", 3, 2)


async def test_an_unreadable_scored_group_is_dropped_and_the_rest_used(nats_url: str) -> None:
    async with a_node(nats_url, external=0) as node:
        await node.transport.publish(node_scored(node.id), b"\xc1", stream=node_scored_stream(node.id), message_id="junk")
        await node.publish(0, 1)
        node.start()
        [batch] = await node.batches(1)
        assert batch.state.dropped_local == 1
        assert batch.state.floor_seq == 3


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_local_group_pushed_out_of_the_stream_is_lost_only_to_a_restarted_sampler(nats_url: str, restarted: bool) -> None:
    async with a_node(nats_url, external=0) as node:
        await node.publish(0, 1)
        node.start()

        async def both_pooled() -> bool:
            return len(await node.raw_batches()) == 1

        await until(both_pooled)
        await node.publish(2, version=1)

        async def pooled() -> bool:
            return node.context.status.get("pool_local") == 1

        await until(pooled)
        if restarted:
            await node.kill()
        await node.transport.delete(node_scored_stream(node.id), 3)
        if restarted:
            node.start()
        await node.publish(3, 4, version=1)
        await node.train_to(1)
        second = (await node.batches(2))[1]
        assert [item.scored.group.draw for item in second.items] == ([3, 4] if restarted else [2, 3])
        assert second.state.dropped_local == restarted


async def test_groups_larger_than_a_message_pass_through(nats_url: str) -> None:
    async with a_node(nats_url, external=0) as node:
        await node.publish(0, 1, text_chars=1_500_000)
        node.start()
        [batch] = await node.batches(1)
        assert [len(item.scored.group.completions[0].text) for item in batch.items] == [1_500_000] * 2


async def test_the_sampler_outlives_a_killed_server(nats_server: Callable[..., NatsServer]) -> None:
    server = nats_server()
    async with a_node(server.url, external=0) as node:
        node.start()
        await node.publish(0, 1)
        await node.batches(1)
        server.kill()
        await asyncio.sleep(0.3)
        server.start()
        await node.publish(2, 3, version=1)
        await node.train_to(1)
        assert (await node.batches(2))[1].number == 2


async def test_killed_again_and_again_a_sampler_that_learns_and_adapts_builds_the_same_batches(
    nats_server: Callable[..., NatsServer],
) -> None:
    """Strategy and J move here with what the node's local groups and held-out results show; both
    travel in the newest batch.
    """
    steering = {
        "strategy": "bandit", "bandit_arms": ["learnability", "balanced"], "adapt": "adaptive", "adapt_period": 2,
        "local": 2, "external": 2, "max_staleness": 3, "shortage_wait_s": 0.0,
    }  # fmt: skip
    logs, steps = [], 14
    for kills in (False, True):
        async with a_node(nats_server().url, "alpha", **steering) as node:
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
    assert {batch.strategy.split(",")[0] for batch in batches} <= {"bandit: learnability", "bandit: balanced"}
    last = batches[-1].state
    assert last.steering.sharing is not None and last.steering.sharing.external == 2, "J has come back"
    assert [(level.dataset, level.rate) for level in last.steering.sharing.datasets] == [("gcd", 0.1 + 0.02 * 12), ("lcm", 0.2)]
    assert last.own.groups == 4 * steps and last.steering.bandit is not None and last.steering.bandit.version == 12
    assert [len(batch.items) for batch in batches] == [4] * steps


async def test_a_dataset_that_is_forgotten_while_another_is_learnt_halves_j_and_the_log_names_it(nats_url: str) -> None:
    steering = {"adapt": "adaptive", "adapt_period": 1, "local": 2, "external": 2, "max_staleness": 3, "shortage_wait_s": 0.0}
    with structlog.testing.capture_logs() as said:
        async with a_node(nats_url, **steering) as node:
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
    assert batches[-1].state.steering.sharing is not None and batches[-1].state.steering.sharing.external == 1
    [move] = [line for line in said if line["event"] == "steered"]
    assert (move["external"], move["why"]) == (1, "held-out pass rate of gcd fell: J halved")


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
        await node.transport.delete(node_scored_stream(node.id), 1)
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
