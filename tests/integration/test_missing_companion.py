"""A hub that has lost the stream for chunks of large groups, or never had it, gets it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.contracts import subjects
from shared.contracts.streams import ensure_swarm_streams, swarm_streams
from shared.transport.base import Deadline, Transport, TransportError
from shared.transport.blobs import companion_name
from shared.transport.connect import connect
from shared.transport.nats import jetstream_api as api
from shared.transport.nats.transport import connection_of
from swarm_cli.app import app
from tests.nats_server import NatsServer

ROLLOUTS = subjects.SWARM_ROLLOUTS
SMALLER = 64 * 2**20


async def without_companion(server: NatsServer) -> Transport:
    """A connection to a hub that has the streams but one companion, and whose operator has chosen a
    limit.
    """
    plane = await connect(server.url, name="alpha")
    await ensure_swarm_streams(plane)
    for name in (ROLLOUTS, companion_name(ROLLOUTS)):
        await api.call(connection_of(plane), f"STREAM.DELETE.{name}", None, Deadline(30), name)
    (spec,) = [spec for spec in swarm_streams() if spec.name == ROLLOUTS]
    config = dict(api.stream_config(spec)) | {"max_bytes": SMALLER}
    await api.call(connection_of(plane), f"STREAM.CREATE.{ROLLOUTS}", config, Deadline(30), ROLLOUTS)
    return plane


async def test_a_newcomer_makes_it_and_leaves_the_stream_as_it_is(nats_server: Callable[..., NatsServer]) -> None:
    plane = await without_companion(nats_server())
    try:
        with pytest.raises(TransportError):
            await plane.stream_state(companion_name(ROLLOUTS))
        await ensure_swarm_streams(plane)
        await plane.stream_state(companion_name(ROLLOUTS))
        told = await api.call(connection_of(plane), f"STREAM.INFO.{ROLLOUTS}", None, Deadline(30), ROLLOUTS)
        assert told["config"]["max_bytes"] == SMALLER
        with pytest.raises(TransportError):
            await plane.stream_state(companion_name(companion_name(ROLLOUTS)))
    finally:
        await plane.close()


async def test_the_operator_s_command_makes_it(nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    server = nats_server()
    plane = await without_companion(server)
    try:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["nats", "init", "--plane", "swarm", "--swarm-url", server.url])
        assert done.exit_code == 0, done
        await plane.stream_state(companion_name(ROLLOUTS))
    finally:
        await plane.close()


def test_status_of_an_empty_server_ends_with_1_for_programs_as_well(nats_server: Callable[..., NatsServer]) -> None:
    server = nats_server()
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, ["status", "--node-url", server.url, *more])
        assert done.exit_code == 1, done
    assert json.loads(done.stdout)["nodes"] == {}
