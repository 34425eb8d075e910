"""A backup of a server that is written to meanwhile can be restored: what newer values of a key
replaced during the backup is not missed.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_bucket
from tests.integration.nats_backups import BUCKET, opened, states, swarm, target
from tests.nats_server import NatsServer

__all__ = ["target"]
HISTORY = 8
"""Values that a node's bucket keeps of each key."""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[NatsServer]:
    """A server on which each key of a node's bucket has all the values that are kept."""
    server = NatsServer(tmp_path / "busy").start()

    async def fill() -> None:
        transport = await opened(server.url)
        await ensure_node_streams(transport, "alpha")
        await transport.close()

    asyncio.run(fill())
    put(server.url, HISTORY)
    yield server
    server.kill()


def put(url: str, values: int) -> None:
    """Write each of five keys so many times."""

    async def write() -> None:
        transport = await opened(url)
        for _ in range(values):
            for key in ("status.trainer", "status.verifier", "intake", "ledger", "policy"):
                await transport.kv.put(node_bucket("alpha"), key, os.urandom(400))
        await transport.close()

    asyncio.run(write())


def entry_of(folder: Path) -> dict[str, Any]:
    (entry,) = json.loads((folder / "backup.json").read_bytes())["streams"]
    return dict(entry)


def test_fewer_messages_than_were_counted_are_told_and_another_end_is_refused_and_removed_again(
    busy: NatsServer, target: NatsServer, tmp_path: Path
) -> None:
    """As a server writes it whose values are replaced while it sends them: the state counts more
    than the file holds.
    """
    folder = tmp_path / "saved"
    code, said = swarm("backup", "--out", str(folder), "--stream", BUCKET, url=busy.url)
    assert code == 0, said
    manifest = json.loads((folder / "backup.json").read_bytes())
    (entry,) = manifest["streams"]
    entry["server_state"]["messages"] += 2
    for last_seq, good in ((entry["server_state"]["last_seq"] + 1, False), (entry["server_state"]["last_seq"], True)):
        entry["server_state"]["last_seq"] = last_seq
        (folder / "backup.json").write_text(json.dumps(manifest))
        code, said = swarm("restore", str(folder), url=target.url)
        assert (code == 0) == good and ("2 more were removed" in said) == good, said
        assert (BUCKET in asyncio.run(states(target.url))) == good


@contextmanager
def written_all_the_while(url: str) -> Iterator[None]:
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            put(url, 20)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join(120)


def test_backups_of_a_bucket_that_is_written_all_the_while_are_restored(busy: NatsServer, tmp_path: Path) -> None:
    with written_all_the_while(busy.url):
        for number in range(6):
            code, said = swarm("backup", "--out", str(tmp_path / str(number)), "--stream", BUCKET, url=busy.url)
            assert code == 0, said
    for number in range(6):
        empty = NatsServer(tmp_path / f"empty-{number}").start()
        try:
            code, said = swarm("restore", str(tmp_path / str(number)), url=empty.url)
        finally:
            empty.kill()
        assert code == 0, said
