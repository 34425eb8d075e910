"""Every call of `shared.transport.base` may be cancelled wherever it waits, over both transports.

The call then ends with CancelledError and nothing else, also where the cancellation comes together
with the server's answer; it leaves no task and no subscription behind; and the transport works on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from shared.transport.base import ConsumerSpec, KeyValue, KvEntry, StreamSpec, Transport
from shared.transport.connect import connect
from shared.transport.nats.pull import Delivery, fetch
from shared.transport.nats.transport import connection_of
from tests.integration.cancel_at import CancelledAt, Moment
from tests.integration.transport_planes import LOG, QUEUE, Body, Plane

LARGE = os.urandom(1_500_000)
MOST_TURNS = 200
WORKER = ConsumerSpec(name="worker", ack_wait_s=0.5, max_deliver=-1, max_ack_pending=100)
_numbers = count()


@dataclass
class Scene:
    """A transport with what its calls need, and what to look at afterwards."""

    plane: Plane
    transport: Transport
    log: StreamSpec
    queue: StreamSpec
    bucket: str
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @classmethod
    async def set_up(cls, plane: Plane) -> Scene:
        transport = await plane.open()
        queue = plane.named(replace(QUEUE, max_msgs=-1, discard_new=False))
        scene = cls(plane, transport, plane.named(LOG), queue, f"bucket_{plane.tag}")
        await transport.ensure_stream(scene.log)
        await transport.ensure_stream(queue)
        await transport.ensure_consumer(queue.name, WORKER)
        await transport.kv.ensure(scene.bucket)
        await scene.works()
        scene.tasks = asyncio.all_tasks()
        return scene

    async def publish(self, payload: bytes = b"x") -> int:
        """To the log; returns the sequence."""
        number = next(_numbers)
        return (await self.transport.publish(f"{self.plane.tag}.log.a", payload, stream=self.log.name, message_id=f"m{number}")).seq

    async def offer(self, payload: bytes = b"x") -> None:
        """To the queue."""
        number = next(_numbers)
        await self.transport.publish(f"{self.plane.tag}.queue", payload, stream=self.queue.name, message_id=f"q{number}")

    async def take(self) -> Delivery:
        """The next of the queue, which may have been handed to a fetch that was cancelled."""
        async with asyncio.timeout(120):
            while True:
                for delivery in await fetch(self.transport, self.queue.name, WORKER.name, 1, 1.0):
                    return delivery

    async def works(self) -> None:
        """The transport does everything that a service wants of it."""
        transport, value = self.transport, b"%d" % next(_numbers)
        seq = await self.publish(value)
        assert [message.inline for message in await transport.read(self.log.name, seq, 1)] == [value]
        await self.offer(value)
        while (delivery := await self.take()).message.inline != value:
            await delivery.ack()
        await delivery.ack()
        await transport.kv.put(self.bucket, "works", value)
        found = await transport.kv.get(self.bucket, "works")
        assert found is not None and found.value == value
        async with aclosing(transport.kv.watch(self.bucket, "works")) as watch:  # type: ignore[type-var]
            assert await anext(watch) == found

    async def left_nothing(self) -> None:
        """Check that what runs in the background ends by itself; nothing else has been left."""

        def left() -> set[asyncio.Task[Any]]:
            return {task for task in asyncio.all_tasks() - self.tasks if task is not asyncio.current_task()}

        for _ in range(100):
            if not left():
                break
            await asyncio.sleep(0.05)
        assert not left()
        client = connection_of(self.transport).client
        assert len(client._subs) == 1, "the one for replies"
        assert not client._resp_map


Call = Callable[[Scene], Awaitable[Coroutine[Any, Any, object]]]
"""Prepares a call and returns it, not yet begun."""


async def _ensure_stream(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.ensure_stream(replace(scene.log, description=f"{next(_numbers)}"))


async def _ensure_consumer(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.ensure_consumer(scene.queue.name, WORKER)


async def _kv_ensure(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.kv.ensure(scene.bucket)


async def _publish(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.publish()


async def _publish_large(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.publish(LARGE)


async def _publish_twice(scene: Scene) -> Coroutine[Any, Any, object]:
    number = next(_numbers)

    def once() -> Coroutine[Any, Any, object]:
        return scene.transport.publish(f"{scene.plane.tag}.log.a", LARGE, stream=scene.log.name, message_id=f"m{number}")

    await once()
    return once()


async def _publish_against_another(scene: Scene) -> Coroutine[Any, Any, object]:
    last = await scene.publish()
    return scene.transport.publish(
        f"{scene.plane.tag}.log.a", b"x", stream=scene.log.name, message_id=f"m{next(_numbers)}", expected_last_seq=last
    )


async def _fetch(scene: Scene) -> Coroutine[Any, Any, object]:
    for _ in range(2):
        await scene.offer()
    return fetch(scene.transport, scene.queue.name, WORKER.name, 3, 0.5)


async def _fetch_nothing(scene: Scene) -> Coroutine[Any, Any, object]:
    while (await scene.transport.stream_state(scene.queue.name)).messages:
        await (await scene.take()).ack()
    return fetch(scene.transport, scene.queue.name, WORKER.name, 3, 0.1)


async def _payload_large(scene: Scene) -> Coroutine[Any, Any, object]:
    message = await scene.transport.get(scene.log.name, await scene.publish(LARGE))
    assert message is not None and message.inline is None
    return scene.transport.payload(message)


async def _read(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.read(scene.log.name, await scene.publish(), 10)


async def _get(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.get(scene.log.name, await scene.publish())


async def _next(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.next(scene.log.name, f"{scene.plane.tag}.log.a", await scene.publish())


async def _last(scene: Scene) -> Coroutine[Any, Any, object]:
    await scene.publish()
    return scene.transport.last(scene.log.name, f"{scene.plane.tag}.log.a")


async def _ends(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.ends(scene.log.name)


async def _stream_state(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.stream_state(scene.log.name)


async def _counts(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.counts(scene.log.name, ">")


async def _consumer_state(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.consumer_state(scene.queue.name, WORKER.name)


async def _purge(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.purge(scene.log.name, await scene.publish(LARGE))


async def _kv_buckets(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.kv.buckets()  # type: ignore[return-value]


async def _kv_get(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.kv.get(scene.bucket, "works")


async def _kv_put(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.kv.put(scene.bucket, "k", b"1")


async def _kv_update(scene: Scene) -> Coroutine[Any, Any, object]:
    revision = await scene.transport.kv.put(scene.bucket, "k", b"1")
    return scene.transport.kv.update(scene.bucket, "k", b"2", last_revision=revision)


async def _kv_newest(scene: Scene) -> Coroutine[Any, Any, object]:
    return scene.transport.kv.newest(scene.bucket, 5)


async def _kv_watch(scene: Scene) -> Coroutine[Any, Any, object]:
    """The value that is there, then one that is written while it waits for it."""

    async def two() -> list[KvEntry]:
        seen: list[KvEntry] = []
        async with aclosing(scene.transport.kv.watch(scene.bucket, "works", poll_s=0.05)) as watch:  # type: ignore[type-var]
            async for entry in watch:
                seen.append(entry)
                if len(seen) == 2:
                    break
                await scene.transport.kv.put(scene.bucket, "works", b"another")
        return seen

    return two()


async def _ack(scene: Scene) -> Coroutine[Any, Any, object]:
    await scene.offer()
    return (await scene.take()).ack()


async def _ack_large(scene: Scene) -> Coroutine[Any, Any, object]:
    await scene.offer(LARGE)
    return (await scene.take()).ack()


async def _nak(scene: Scene) -> Coroutine[Any, Any, object]:
    await scene.offer()
    return (await scene.take()).nak()


async def _in_progress(scene: Scene) -> Coroutine[Any, Any, object]:
    await scene.offer()
    return (await scene.take()).in_progress()


async def _close(scene: Scene) -> Coroutine[Any, Any, object]:
    return (await connect(scene.plane.url, name="closed")).close()


async def _connect(scene: Scene) -> Coroutine[Any, Any, object]:
    async def connected() -> None:
        transport = await connect(scene.plane.url, name="connected")
        try:
            await asyncio.sleep(0)
        finally:
            await transport.close()

    return connected()


CALLS: dict[str, Call] = {
    name: call for name, call in list(globals().items()) if name.startswith("_") and asyncio.iscoroutinefunction(call)
}


def test_each_call_of_the_interface_is_tried() -> None:
    calls = {name for name in vars(Transport) if not name.startswith("_")} - {
        "certificate_expires_at",
        "connected",
        "counters",
        "fenced",
        "kv",
    }
    calls |= {f"kv_{name}" for name in vars(KeyValue) if not name.startswith("_")}
    assert {call for call in calls if not any(name.startswith(f"_{call}") for name in CALLS)} == set()


async def cancelled(scene: Scene, call: Call, turn: int, moment: Moment) -> bool:
    """Return whether the call waited that often. Fails where it does not end as a cancelled call
    does.
    """
    work = CancelledAt(await call(scene), turn, moment)
    task = asyncio.create_task(work.run())
    done, _ = await asyncio.wait({task}, timeout=20)
    assert done, f"it goes on after being cancelled where it waits for the {turn}th time"
    if work.came:
        error = None if task.cancelled() else task.exception()
        assert error is None, f"cancelled where it waits for the {turn}th time, it raised {error!r}"
        assert task.cancelled(), f"cancelled where it waits for the {turn}th time, it swallowed that"
    else:
        task.result()
    return work.came


@pytest.mark.deadline(300)
@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
@pytest.mark.parametrize("name", CALLS, ids=lambda name: name[1:])
async def test_a_call_cancelled_wherever_it_waits_ends_so_and_leaves_nothing(
    over: Callable[[Body], Awaitable[None]], name: str, moment: Moment
) -> None:
    async def body(plane: Plane) -> None:
        scene = await Scene.set_up(plane)
        for turn in range(1, MOST_TURNS):
            came = await cancelled(scene, CALLS[name], turn, moment)
            await scene.left_nothing()
            await scene.works()
            if not came:
                return
        raise AssertionError(f"it waits {MOST_TURNS} times")

    await over(body)
