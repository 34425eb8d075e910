"""`swarm nats forget`: a stopped node's streams end, and nobody else's; one that is held stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import LeaseRecord
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.policy_store.jetstream import prepare_policies_stream
from shared.transport.base import Deadline
from shared.transport.connect import connect
from shared.transport.nats import administration
from shared.transport.nats.transport import connection_of
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from tests.nats_server import NatsServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    running = NatsServer(tmp_path / "nats").start()
    yield running
    running.kill()


def forget(node: str, server: NatsServer) -> Result:
    return CliRunner().invoke(app, ["nats", "forget", node, "--node-url", server.url])


async def streams(server: NatsServer) -> set[str]:
    plane = await connect(server.url, name="test")
    listed = await administration.streams(connection_of(plane), Deadline(10.0))
    await plane.close()
    return {str(entry["config"]["name"]) for entry in listed.entries}


def lease(*, released: bool) -> LeaseRecord:
    return LeaseRecord(holder="h", run="run-1", host="here", pid=7, taken_at=time.time(), lease_s=60.0, released=released)


async def test_a_stopped_nodes_streams_end_and_nobody_elses(server: NatsServer) -> None:
    plane = await connect(server.url, name="test")
    await ensure_swarm_streams(plane)
    await ensure_node_streams(plane, "alpha-2")
    others = await streams(server)
    await ensure_node_streams(plane, "alpha")
    await prepare_policies_stream(plane, "alpha", create=True)
    bucket, key = subjects.node_bucket("alpha"), subjects.lease_key("trainer")
    await plane.kv.put(bucket, key, encode(lease(released=False)))
    all_streams = await streams(server)
    assert len(all_streams - others) >= 6

    held = await asyncio.to_thread(forget, "alpha", server)
    assert isinstance(held.exception, CommandError) and "process 7 on here (run run-1)" in str(held.exception)
    assert await streams(server) == all_streams

    await plane.kv.put(bucket, key, encode(lease(released=True)))
    done = await asyncio.to_thread(forget, "alpha", server)
    assert done.exit_code == 0, done.output
    assert await streams(server) == others
    again = await asyncio.to_thread(forget, "alpha", server)
    assert again.exit_code == 0 and "none to delete" in again.output
    await plane.close()
