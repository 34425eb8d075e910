"""A node's plane with a sampler that a test starts, stops and kills, and scored groups to
feed it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

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
from tests.constants import load_with_constants
from tests.unit.sampler_groups import scored_group

DEADLINE_S = 180.0


def still_clock() -> float:
    return 1000.0


def configured(node: str, **sampler: Any) -> NodeConfig:
    # uniform: what a batch holds is what is trained on, not candidates of which the trainer
    # chooses.
    chosen = {"local": 2, "external": 2, "strategy": "uniform", "adapt": "off", "shortage_wait_s": 0.2, **sampler}
    return load_with_constants({"node": {"id": node}, "tasks": [{"dataset": "chain_sum"}], "sampler": chosen})


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
