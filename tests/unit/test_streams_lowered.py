"""`swarm nats init` looks at all streams before it changes the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shared.contracts.limits import NODE_LIMITS
from shared.contracts.streams import (
    ensure_node_streams,
    ensure_swarm_streams,
    node_streams,
    swarm_streams,
)
from shared.contracts.subjects import SWARM_NODES_BUCKET, SWARM_ROLLOUTS
from shared.policy_store.jetstream import policies_stream
from shared.transport.base import Deadline, StreamSpec, Transport
from shared.transport.blobs import companion
from shared.transport.nats import administration
from shared.transport.nats.transport import connection_of
from swarm_cli.nats.commands import lowered_node_streams, lowered_swarm_streams, update_swarm_streams
from tests.nats_server import own_plane


async def configurations(transport: Transport) -> dict[str, object]:
    """The settings of every stream and bucket."""
    listed = await administration.streams(connection_of(transport), Deadline(5.0))
    return {entry["config"]["name"]: entry["config"] for entry in listed.entries}


def larger(spec: StreamSpec) -> StreamSpec:
    """With a limit that the wanted one is below."""
    if spec.max_bytes > 0:
        return replace(spec, max_bytes=2 * spec.max_bytes)
    return replace(spec, max_msg_bytes=2 * spec.max_msg_bytes)


async def test_a_look_at_no_streams_makes_none() -> None:
    transport = await own_plane()
    assert await lowered_node_streams(transport, "alpha", [policies_stream("alpha")]) == []
    assert await lowered_swarm_streams(transport) == []
    assert not await configurations(transport)


async def test_all_streams_that_would_be_lowered_are_named_and_none_is_changed() -> None:
    transport = await own_plane()
    first, *others = node_streams("alpha")
    older = replace(first, max_msgs=NODE_LIMITS.rollouts_max_msgs - 1)
    others.append(policies_stream("alpha"))
    for spec in (older, *map(larger, others)):
        await transport.ensure_stream(spec)
    before = await configurations(transport)
    found = await lowered_node_streams(transport, "alpha", [policies_stream("alpha")])
    for spec in others:
        for each in filter(None, (spec, companion(spec))):
            assert sum(f"stream {each.name} was left unchanged: this would lower max_" in told for told in found) == 1
    assert not any(f"stream {first.name} " in told for told in found), "it would only be raised"
    assert await configurations(transport) == before
    for spec in others:
        await transport.ensure_stream(spec)
    assert await lowered_node_streams(transport, "alpha", [policies_stream("alpha")]) == []
    await ensure_node_streams(transport, "alpha")


async def test_the_operator_sizes_the_window_of_groups_and_a_joining_node_leaves_it_as_it_is() -> None:
    transport = await own_plane()
    await update_swarm_streams(transport, window_bytes=3 * 2**30)
    await ensure_swarm_streams(transport)
    window: Any = (await configurations(transport))[SWARM_ROLLOUTS]
    assert (window["max_bytes"], window["max_age"]) == (3 * 2**30, 3600 * 10**9)
    assert any("max_bytes" in told for told in await lowered_swarm_streams(transport)), "the default would delete a third of it"


async def test_the_swarms_bucket_is_looked_at_beside_its_streams() -> None:
    transport = await own_plane()
    await update_swarm_streams(transport)
    for spec in swarm_streams():
        await transport.ensure_stream(larger(spec))
    await transport.kv.ensure(SWARM_NODES_BUCKET, replicas=1)
    before = await configurations(transport)
    found = await lowered_swarm_streams(transport)
    assert all(any(f"stream {spec.name} " in told for told in found) for spec in swarm_streams())
    assert any("max_age_s from no limit" in told for told in found)
    assert await configurations(transport) == before
