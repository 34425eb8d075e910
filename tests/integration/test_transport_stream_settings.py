"""What `shared.transport.base` promises of streams that are made, or made with other settings than
they have, over both transports.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams, node_streams
from shared.transport.base import Lowering, Retention, StreamFull, TransportError, WouldLower
from shared.transport.nats.pull import fetch
from tests.integration.transport_planes import WORKER, Plane, until


async def test_settings_that_drifted_are_updated(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        await plane.queue(transport, 4, max_msgs=4)
        spec = await plane.queue(transport, max_msgs=6)
        for number in (4, 5):
            await transport.publish(f"{plane.tag}.queue", b"x", stream=spec.name, message_id=f"m{number}")
        await transport.ensure_consumer(spec.name, replace(WORKER, max_ack_pending=2))
        assert len(await fetch(transport, spec.name, "worker", 10, 1.0)) == 2

    await over(body)


@pytest.mark.parametrize(
    ("existing", "wanted", "told"),
    [
        ({"max_msgs": 6}, {"max_msgs": 4}, "max_msgs from 6 to 4"),
        ({"max_bytes": 4096}, {"max_bytes": 2048}, "max_bytes from 4096 to 2048"),
        ({}, {"max_age_s": 60.0}, r"max_age_s from no limit to 60"),
        ({"max_age_s": 60.0}, {"max_age_s": 30.0}, r"max_age_s from 60\.0 to 30\.0"),
    ],
)
async def test_copies_room_and_time_are_lowered_only_where_that_is_meant(over, existing, wanted, told):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 5, **existing)
        lower = replace(spec, **{name: value for name, value in wanted.items()})
        with pytest.raises(WouldLower, match=told):
            await transport.ensure_stream(lower, Lowering.REFUSE)
        with pytest.raises(WouldLower, match=told):
            await transport.ensure_stream(lower, Lowering.LOOK)
        await transport.ensure_stream(replace(lower, name=f"{lower.name}_none", subjects=("none",)), Lowering.LOOK)
        with pytest.raises(TransportError):
            await transport.stream_state(f"{lower.name}_none")
        await transport.ensure_stream(lower, Lowering.KEEP)
        await transport.ensure_stream(spec, Lowering.REFUSE)  # nothing was lowered, so nothing would be raised or lowered
        assert (await transport.stream_state(spec.name)).messages == 5
        await transport.ensure_stream(lower, Lowering.APPLY)
        with pytest.raises(WouldLower):
            await transport.ensure_stream(
                replace(lower, **{name: type(value)(value / 2) for name, value in wanted.items()}), Lowering.REFUSE
            )

    await over(body)


async def test_what_is_raised_or_is_no_protection_is_updated_beside_a_limit_that_is_kept(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.queue(transport, max_msgs=4)
        await transport.ensure_stream(replace(spec, max_msgs=2, max_bytes=-1, max_msg_bytes=3), Lowering.APPLY)
        await transport.ensure_stream(replace(spec, max_msgs=1, max_msg_bytes=100), Lowering.KEEP)
        for number in range(2):
            await transport.publish(f"{plane.tag}.queue", b"longer", stream=spec.name, message_id=f"m{number}")
        with pytest.raises(StreamFull):
            await transport.publish(f"{plane.tag}.queue", b"x", stream=spec.name, message_id="m2")

    await over(body)


async def test_a_shorter_duplicate_window_needs_no_leave_because_it_deletes_nothing(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        spec = await plane.log(transport, 3, duplicate_window_s=600.0)
        shorter = replace(spec, duplicate_window_s=0.2)
        await transport.ensure_stream(shorter, Lowering.LOOK)
        await transport.ensure_stream(shorter, Lowering.REFUSE)
        assert (await transport.stream_state(spec.name)).messages == 3
        await transport.publish(f"{plane.tag}.log.again", b"x", stream=spec.name, message_id="twice")

        async def forgotten() -> bool:
            ack = await transport.publish(f"{plane.tag}.log.again", b"x", stream=spec.name, message_id="twice")
            return not ack.duplicate

        await until(forgotten)

    await over(body)


async def test_a_service_with_a_shorter_time_leaves_a_bucket_s_time_alone(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        bucket = f"held_{plane.tag}"
        await transport.kv.ensure(bucket, ttl_s=60.0)
        await transport.kv.ensure(bucket, ttl_s=0.5, lowering=Lowering.KEEP)
        with pytest.raises(WouldLower, match="max_age"):
            await transport.kv.ensure(bucket, ttl_s=0.5, lowering=Lowering.REFUSE)
        await transport.kv.put(bucket, "key", b"value")
        await asyncio.sleep(1.0)
        assert await transport.kv.get(bucket, "key") is not None

    await over(body)


async def test_a_change_that_a_server_cannot_make_names_the_remedy(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        await plane.queue(transport)
        with pytest.raises(TransportError, match="nats stream rm"):
            await plane.queue(transport, retention=Retention.LIMITS)

    await over(body)


async def test_all_processes_of_two_nodes_can_set_up_their_streams_at_once(over):
    async def body(plane: Plane) -> None:
        transports = [await plane.open() for _ in range(8)]
        nodes = [f"{plane.tag}-{n % 2}" for n in range(8)]
        await asyncio.gather(*(ensure_node_streams(t, node) for t, node in zip(transports, nodes, strict=True)))
        await asyncio.gather(*(ensure_swarm_streams(t) for t in transports))
        await ensure_swarm_streams(transports[0])
        for spec in node_streams(nodes[0]):
            assert (await transports[0].stream_state(spec.name)).messages == 0
        assert (await transports[0].consumer_state(node_streams(nodes[0])[0].name, "verifier")).pending == 0

    await over(body)


async def test_setting_up_a_node_leaves_the_verifier_s_own_consumer_settings_alone(over):
    async def body(plane: Plane) -> None:
        transport = await plane.open()
        stream = node_streams(plane.tag)[0].name
        await ensure_node_streams(transport, plane.tag)
        await transport.ensure_consumer(stream, replace(WORKER, name="verifier", max_ack_pending=1))
        await ensure_node_streams(transport, plane.tag)
        for number in range(2):
            await transport.publish(f"node.{plane.tag}.rollouts", b"x", stream=stream, message_id=f"{number}")
        assert len(await fetch(transport, stream, "verifier", 2, 1.0)) == 1

    await over(body)
