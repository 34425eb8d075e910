"""`swarm nats init` looks at all streams before it changes the first."""

from __future__ import annotations

from dataclasses import replace

from shared.contracts.limits import NODE_LIMITS
from shared.contracts.streams import (
    ensure_node_streams,
    lowered_node_streams,
    lowered_swarm_streams,
    node_streams,
    swarm_streams,
    update_swarm_streams,
)
from shared.contracts.subjects import SWARM_NODES_BUCKET
from shared.policy_store.jetstream import policies_stream
from shared.transport.blobs import companion
from shared.transport.memory.server import MemoryServer
from shared.transport.memory.transport import MemoryTransport


async def test_a_look_at_no_streams_makes_none() -> None:
    server = MemoryServer()
    transport = MemoryTransport(server)
    assert await lowered_node_streams(transport, "alpha", [policies_stream("alpha")]) == []
    assert await lowered_swarm_streams(transport) == []
    assert not server.streams and not server.buckets


async def test_all_streams_that_would_be_lowered_are_named_and_none_is_changed() -> None:
    server = MemoryServer()
    transport = MemoryTransport(server)
    first, *others = node_streams("alpha", replicas=3)
    older = replace(first, max_msgs=NODE_LIMITS.rollouts_max_msgs - 1)
    policies = policies_stream("alpha", replicas=3)
    for spec in (replace(older, replicas=1), *others, policies):
        await transport.ensure_stream(spec)
    before = {name: stream.spec for name, stream in server.streams.items()}
    found = await lowered_node_streams(transport, "alpha", [policies_stream("alpha")])
    for spec in (*others, policies):
        for each in filter(None, (spec, companion(spec))):
            assert (
                sum(f"stream {each.name} was left unchanged: this would lower replicas from 3 to 1" in told for told in found) == 1
            )
    assert not any(f"stream {first.name} " in told for told in found), "it would only be raised"
    assert {name: stream.spec for name, stream in server.streams.items()} == before
    assert await lowered_node_streams(transport, "alpha", [policies], replicas=3) == []
    await ensure_node_streams(transport, "alpha", replicas=3)


async def test_the_swarms_bucket_is_looked_at_beside_its_streams() -> None:
    server = MemoryServer()
    transport = MemoryTransport(server)
    await update_swarm_streams(transport, replicas=3)
    server.buckets[SWARM_NODES_BUCKET].ttl_s = 0.0
    found = await lowered_swarm_streams(transport)
    assert all(any(f"stream {spec.name} " in told for told in found) for spec in swarm_streams())
    assert any("max_age from no limit" in told for told in found)
    assert server.buckets[SWARM_NODES_BUCKET].ttl_s == 0.0
