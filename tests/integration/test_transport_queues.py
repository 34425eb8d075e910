"""What `shared.transport.base` promises of queues and those who fetch from them, over both
transports.
"""

from __future__ import annotations

import asyncio

import pytest

from shared.transport.base import ConsumerState, NotConnected
from shared.transport.nats.pull import fetch
from tests.integration.transport_planes import Plane


async def test_an_acknowledged_message_leaves_the_queue_and_a_second_ack_does_nothing(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 2)
        first, second = await fetch(transport, spec.name, "worker", 10, 2.0)
        assert (first.message.inline, first.deliveries, second.message.inline) == (b"0", 1, b"1")
        assert await transport.consumer_state(spec.name, "worker") == ConsumerState(0, 2, 0)
        await first.ack()
        await first.ack()
        await first.nak()
        assert (await transport.stream_state(spec.name)).messages == 1
        await second.ack()
        assert (await transport.stream_state(spec.name)).messages == 0
        assert await fetch(transport, spec.name, "worker", 1, 0.6) == []

    await over(body)


async def test_an_empty_queue_gives_nothing_within_the_timeout(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport)
        started = asyncio.get_running_loop().time()
        assert await fetch(transport, spec.name, "worker", 5, 0.3) == []
        assert 0.25 < asyncio.get_running_loop().time() - started < 10.0

    await over(body)


async def test_a_waiting_fetch_returns_as_soon_as_one_message_is_there(over):
    async def body(plane: Plane) -> None:
        reader, writer = await plane.open(), await plane.open()
        spec = await plane.queue(reader)
        waiting = asyncio.create_task(fetch(reader, spec.name, "worker", 8, 60.0))
        await asyncio.sleep(0.2)
        started = asyncio.get_running_loop().time()
        await writer.publish(f"{plane.tag}.queue", b"x", stream=spec.name, message_id="1")
        [delivery] = await waiting
        assert asyncio.get_running_loop().time() - started < 30.0
        await delivery.ack()

    await over(body)


async def test_two_readers_share_a_queue_without_overlap(over):
    async def body(plane: Plane) -> None:
        readers = [await plane.open(), await plane.open()]
        spec = await plane.queue(readers[0], 10)
        handed = await asyncio.gather(*(fetch(reader, spec.name, "worker", 5, 2.0) for reader in readers))
        positions = sorted(delivery.message.seq for deliveries in handed for delivery in deliveries)
        assert positions == sorted(set(positions))
        for deliveries in handed:
            for delivery in deliveries:
                await delivery.ack()

    await over(body)


async def test_a_message_given_back_is_handed_out_again_after_its_delay(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 1)
        [delivery] = await fetch(transport, spec.name, "worker", 1, 2.0)
        await delivery.nak(0.3)
        assert await fetch(transport, spec.name, "worker", 1, 0.1) == []
        [again] = await fetch(transport, spec.name, "worker", 1, 2.0)
        assert again.deliveries == 2
        await again.nak()
        [third] = await fetch(transport, spec.name, "worker", 1, 0.3)
        assert third.deliveries == 3
        await third.ack()

    await over(body)


async def test_an_unacknowledged_message_comes_again_until_max_deliver_and_then_stays(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 1)
        for expected in (1, 2, 3):
            [delivery] = await fetch(transport, spec.name, "worker", 1, 3.0)
            assert delivery.deliveries == expected
        assert await fetch(transport, spec.name, "worker", 1, 1.0) == []
        assert (await transport.stream_state(spec.name)).messages == 1

    await over(body)


async def test_work_in_progress_is_not_handed_out_again(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 1)
        [delivery] = await fetch(transport, spec.name, "worker", 1, 2.0)
        for _ in range(5):
            assert await fetch(transport, spec.name, "worker", 1, 0.2) == []
            await delivery.in_progress()
        await delivery.ack()
        assert (await transport.stream_state(spec.name)).messages == 0

    await over(body)


async def test_no_more_than_max_ack_pending_are_out_at_once(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, 12)
        deliveries = await fetch(transport, spec.name, "worker", 12, 1.0)
        assert len(deliveries) == 10
        for delivery in deliveries:
            await delivery.ack()
        rest = await fetch(transport, spec.name, "worker", 12, 1.0)
        assert [delivery.message.inline for delivery in rest] == [b"10", b"11"]
        for delivery in rest:
            await delivery.ack()

    await over(body)


async def test_fetching_for_a_consumer_that_does_not_exist_says_so(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport)
        with pytest.raises(NotConnected, match="nobody"):
            await fetch(transport, spec.name, "nobody", 1, 0.4)

    await over(body)
