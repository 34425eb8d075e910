"""A server on which each test has streams of its own: for tests of what `shared.transport.base`
promises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from shared.transport.base import ConsumerSpec, KvEntry, Retention, StreamSpec, Transport
from shared.transport.connect import connect

LOG = StreamSpec(name="LOG", subjects=("log.>",))
QUEUE = StreamSpec(name="QUEUE", subjects=("queue",), retention=Retention.WORK_QUEUE, discard_new=True, max_msgs=20)
WORKER = ConsumerSpec(name="worker", ack_wait_s=0.4, max_deliver=3, max_ack_pending=10)


class Plane:
    """Opens transports to one server and gives each test stream names of its own there."""

    def __init__(self, url: str, tag: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.tag = tag
        self._stack = stack

    async def open(self) -> Transport:
        transport = await connect(self.url, name=f"test-{self.tag}")
        self._stack.push_async_callback(transport.close)
        return transport

    def named(self, spec: StreamSpec) -> StreamSpec:
        return replace(spec, name=f"{spec.name}_{self.tag}", subjects=tuple(f"{self.tag}.{s}" for s in spec.subjects))

    async def log(self, transport: Transport, count: int = 0, **changes: object) -> StreamSpec:
        spec = self.named(replace(LOG, **changes))  # type: ignore[arg-type]
        await transport.ensure_stream(spec)
        for number in range(count):
            await transport.publish(f"{self.tag}.log.a", b"%d" % number, stream=spec.name, message_id=f"m{number}")
        return spec

    async def queue(self, transport: Transport, count: int = 0, **changes: object) -> StreamSpec:
        spec = self.named(replace(QUEUE, **changes))  # type: ignore[arg-type]
        await transport.ensure_stream(spec)
        await transport.ensure_consumer(spec.name, WORKER)
        for number in range(count):
            await transport.publish(f"{self.tag}.queue", b"%d" % number, stream=spec.name, message_id=f"m{number}")
        return spec


Body = Callable[[Plane], Awaitable[None]]


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def next_of(watch: AsyncIterator[KvEntry], timeout_s: float = 5.0) -> KvEntry:
    return await asyncio.wait_for(anext(watch), timeout_s)
