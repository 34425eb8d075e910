"""A backup or restore that something comes between, against real servers: a server that restarts, a
file that changes; what comes out is whole or nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.contracts.subjects import node_scored
from shared.transport.base import TransportError
from shared.transport.nats.administration import TransferLost, restore_snapshot, take_snapshot
from tests.integration.nats_backups import DEADLINE_S, SCORED, fill, opened, source, states, swarm, target
from tests.nats_server import NatsServer

__all__ = ["source", "target"]


async def test_a_file_that_changes_while_it_is_sent_makes_no_stream(source: NatsServer, target: NatsServer) -> None:
    transport, parts = await opened(source.url), list[bytes]()
    taken = await take_snapshot(transport.connection, SCORED, parts.append)
    await transport.close()
    other = await opened(target.url)

    def changed() -> Iterator[bytes]:
        yield from parts[:3]
        raise ValueError("changed")

    with pytest.raises(ValueError, match="changed"):
        await restore_snapshot(other.connection, taken.config, taken.state, changed(), timeout_s=10)
    # The server gives up by itself; then the same is restored.
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            made = await restore_snapshot(other.connection, taken.config, taken.state, parts, timeout_s=10)
            break
        except TransportError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
    assert made["state"]["messages"] == taken.state["messages"]
    await other.close()


async def test_a_server_that_restarts_during_a_transfer_is_told_apart_from_a_refusal(
    nats_server: Callable[..., NatsServer],
) -> None:
    server = nats_server()
    await fill(server.url)
    transport, parts = await opened(server.url), list[bytes]()
    for number in range(16):  # more than is on its way at once
        await transport.publish(node_scored("alpha"), os.urandom(900_000), stream=SCORED, message_id=f"large-{number}")

    def restart_first(part: bytes) -> None:
        if not parts:
            server.restart()
        parts.append(part)

    with pytest.raises(TransferLost):
        await take_snapshot(transport.connection, SCORED, restart_first)
    # Again, now that it is back: whole.
    parts.clear()
    await transport.stream_state(SCORED)
    taken = await take_snapshot(transport.connection, SCORED, parts.append)
    await transport.connection.client.request(f"$JS.API.STREAM.DELETE.{SCORED}", b"")

    def restart_later() -> Iterator[bytes]:
        yield parts[0]
        server.restart()
        yield from parts[1:]

    with pytest.raises(TransferLost):
        await restore_snapshot(transport.connection, taken.config, taken.state, restart_later(), timeout_s=10)
    with pytest.raises(TransportError):
        await transport.stream_state(SCORED)  # nothing half
    await restore_snapshot(transport.connection, taken.config, taken.state, parts, timeout_s=10)
    assert (await transport.stream_state(SCORED)).messages == taken.state["messages"]
    await transport.close()


def test_a_backup_that_a_restart_of_the_server_breaks_off_leaves_nothing_and_the_next_is_whole(
    nats_server: Callable[..., NatsServer], tmp_path: Path, target: NatsServer
) -> None:
    server = nats_server()
    asyncio.run(fill(server.url))
    began = threading.Event()

    def restart() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not list(tmp_path.glob(".saved-*/*.snapshot")) and time.monotonic() < deadline:
            time.sleep(0.001)
        began.set()
        server.restart()

    restarting = threading.Thread(target=restart)
    restarting.start()
    code, said = swarm("backup", "--out", str(tmp_path / "saved"), url=server.url)
    restarting.join(DEADLINE_S)
    assert began.is_set()
    if code:  # else it was over before the server ended
        assert code == 1 and not list(tmp_path.glob("*saved*")), said
        code, said = swarm("backup", "--out", str(tmp_path / "saved"), url=server.url)
        assert code == 0, said
    code, said = swarm("restore", str(tmp_path / "saved"), url=target.url)
    assert code == 0 and asyncio.run(states(target.url)) == asyncio.run(states(server.url)), said
