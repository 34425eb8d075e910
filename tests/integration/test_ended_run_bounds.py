"""A look at a run that somebody else made, with a real NATS server: what its store would start does
not start, and the copy cannot grow.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError

from swarm_cli.errors import CommandError
from swarm_cli.looking import store_copy
from swarm_cli.looking.store_copy import server_on_copy
from tests.nats_server import NatsServer


def store(tmp_path: Path, streams: tuple[str, ...], *, pushing: bool = False) -> Path:
    """A run's folder; `pushing`: each stream's messages are delivered to the next one's subject."""
    folder = tmp_path / "runs" / "gift"
    server = NatsServer(tmp_path / "nats", jetstream=f'store_dir: "{folder}"\n  sync_interval: 1m').start()

    async def write() -> None:
        connection = await nats.connect(server.url)
        manager = connection.jetstream(timeout=60)
        for name in streams:
            await manager.add_stream(name=name, subjects=[name.lower()])
            await manager.publish(name.lower(), b"round and round")
        for name, following in zip(streams, streams[1:] + streams[:1], strict=True):
            if pushing:
                config = ConsumerConfig(durable_name="c", ack_policy=AckPolicy.NONE, deliver_subject=f"{following.lower()}")
                await manager.add_consumer(name, config)
                await manager.purge_stream(name)
        await connection.close()

    asyncio.run(write())
    server.stop()
    return folder


def test_messages_that_would_go_round_in_circles_do_not_start_to(tmp_path: Path) -> None:
    folder = store(tmp_path, ("NODE_ALPHA_SCORED", "NODE_ALPHA_DEAD"), pushing=True)
    with pytest.raises(CommandError, match=r"consumer c of NODE_ALPHA_.* deliver_subject"), server_on_copy(folder, tmp_path):
        pass


def test_streams_that_no_command_reads_are_not_copied_whatever_they_do(tmp_path: Path) -> None:
    folder = store(tmp_path, ("A", "B"), pushing=True)
    with server_on_copy(folder, tmp_path) as url:
        assert asyncio.run(_messages(url)) == {}


def test_the_copy_grows_no_further_than_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_copy, "_ROOM_BYTES", 2**20)
    folder = store(tmp_path, ("NODE_ALPHA_SCORED",))
    with server_on_copy(folder, tmp_path) as url:
        assert asyncio.run(_messages(url)) == {"NODE_ALPHA_SCORED": 1}
        with pytest.raises(APIError, match="insufficient resources"):
            asyncio.run(_fill(url, "node_alpha_scored"))


async def _messages(url: str) -> dict[str, int]:
    connection = await nats.connect(url)
    found = {each.config.name or "": each.state.messages for each in await connection.jetstream(timeout=60).streams_info()}
    await connection.close()
    return found


async def _fill(url: str, subject: str) -> None:
    connection = await nats.connect(url)
    try:
        for _ in range(8):
            await connection.jetstream(timeout=60).publish(subject, bytes(500_000))
    finally:
        await connection.close()
