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
from swarm_cli.nats import backup
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


@pytest.mark.parametrize("times", [1, 1_000], ids=["once", "each time"])
def test_a_bucket_whose_values_are_replaced_meanwhile_is_backed_up_again_or_says_how_many_are_missing(
    busy: NatsServer, target: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    taken, take = [], backup.take_snapshot

    async def replaced_meanwhile(*words: Any) -> Any:
        found = await take(*words)
        taken.append(found)
        if len(taken) <= times:
            await asyncio.to_thread(put, busy.url, 1)
        return found

    monkeypatch.setattr(backup, "take_snapshot", replaced_meanwhile)
    folder = tmp_path / "saved"
    code, said = swarm("backup", "--out", str(folder), "--stream", BUCKET, url=busy.url)
    assert code == 0, said
    assert len(taken) == min(times + 1, backup.QUIET_ATTEMPTS)
    assert entry_of(folder)["removed"] == (0 if times == 1 else 5)
    code, said = swarm("restore", str(folder), url=target.url)
    assert code == 0, said


def test_fewer_messages_than_were_removed_meanwhile_are_told_and_still_fewer_refused_and_removed_again(
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
    for removed, good in ((1, False), (2, True)):
        (folder / "backup.json").write_text(json.dumps({**manifest, "streams": [{**entry, "removed": removed}]}))
        code, said = swarm("restore", str(folder), url=target.url)
        assert (code == 0) == good, said
        assert (f"2 of {entry['server_state']['messages']} messages were removed while the backup was made" in said) == good
        assert ("it was removed again" in said) == (not good)
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
