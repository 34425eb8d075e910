"""A disk that takes 300 ms a sync is told as a slow disk: that of a process, and that of the NATS
server. The kernel delays the real system calls of real processes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.trainer.checkpoint import CheckpointStore, LearnerState, PolicyVersion, TrainedModel
from shared import atomic_files
from shared.cancelling import cancel_and_wait
from shared.contracts.status_figures import StatusFigure
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_bucket
from shared.runtime.status import StatusBoard
from shared.runtime.writes import watch_storage
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.chaos.servers import ShippedServer
from tests.full_disk import slow_syncs, strace_works

SYNC_S, DEADLINE_S = 0.3, 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not strace_works(), reason="strace is missing or may not trace here"),
]


class Watched:
    """What one process tells of its storage."""

    def __init__(self, transport: Transport) -> None:
        self.lines: list[dict[str, Any]] = []
        self.board = StatusBoard("alpha", "trainer", "0")
        log = structlog.wrap_logger(None, processors=[self._keep], wrapper_class=structlog.BoundLogger)
        self._watching = asyncio.create_task(watch_storage("alpha", "trainer", "0", transport, self.board, log, every_s=0.5))

    def _keep(self, _logger: object, method: str, event: dict[str, Any]) -> dict[str, Any]:
        self.lines.append({**event, "level": method})
        raise structlog.DropEvent

    async def until_told(self, write: Callable[[], Awaitable[object]]) -> list[dict[str, Any]]:
        """Write until a word is said of it."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.lines and time.monotonic() < deadline:
            await write()
        await self.end()
        return self.lines

    async def end(self) -> None:
        await cancel_and_wait(self._watching)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShippedServer]:
    server = ShippedServer(tmp_path / "nats").start()
    yield server
    server.kill()


async def test_a_server_whose_disk_is_slow_is_told_as_slow_storage(server: ShippedServer) -> None:
    transport = await connect(server.url, name="test")
    await ensure_node_streams(transport, "alpha")
    watched = Watched(transport)
    stored = transport.counters.stores.count
    with slow_syncs(server.pid, SYNC_S):
        lines = await watched.until_told(lambda: transport.kv.put(node_bucket("alpha"), "key", b"value"))
    await transport.close()
    assert [(line["event"], line["level"]) for line in lines] == [("nats_storage_slow", "warning")]
    assert lines[0]["seconds"] == pytest.approx(SYNC_S, rel=0.5) and lines[0]["share_of_time"] > 0.5
    assert "store_dir" in lines[0]["remedy"]
    assert watched.board.get(StatusFigure.NATS_STORE_S) == pytest.approx(SYNC_S, rel=0.5)
    assert str(StatusFigure.DISK_SYNC_S) not in watched.board.snapshot().figures
    assert transport.counters.stores.count - stored >= 5


async def test_a_trainers_checkpoints_on_a_slow_disk_are_told_as_a_slow_disk(server: ShippedServer, tmp_path: Path) -> None:
    transport = await connect(server.url, name="test")
    await ensure_node_streams(transport, "alpha")
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, keep_best=False)
    model = TrainedModel(model_path="m", dtype="float32", lora_rank=0, lora_alpha=1.0, lora_dropout=0.0, lora_target_modules=[])
    state = LearnerState({}, {}, {}, [])
    watched, syncs = Watched(transport), atomic_files.SYNCS.count
    number = 0

    async def save() -> None:
        nonlocal number
        number += 1
        position = PolicyVersion(batch_number=number, stream_seq=number, consumed_local=0)
        await asyncio.to_thread(store.save, state, position, model)

    with slow_syncs(os.getpid(), SYNC_S):
        lines = await watched.until_told(save)
    await transport.close()
    assert [(line["event"], line["level"]) for line in lines] == [("disk_slow", "warning")]
    assert lines[0]["seconds"] == pytest.approx(SYNC_S, rel=0.5) and lines[0]["share_of_time"] > 0.5
    assert "node.var_dir" in lines[0]["remedy"]
    assert watched.board.get(StatusFigure.DISK_SYNC_S) == pytest.approx(SYNC_S, rel=0.5)
    assert atomic_files.SYNCS.count - syncs >= 5 * number - 4, "two files, a manifest and two folders each"


async def test_nothing_is_said_of_storage_that_is_as_fast_as_usual(server: ShippedServer, tmp_path: Path) -> None:
    transport = await connect(server.url, name="test")
    await ensure_node_streams(transport, "alpha")
    watched = Watched(transport)
    for number in range(200):
        await transport.kv.put(node_bucket("alpha"), "key", b"value")
        await asyncio.to_thread(atomic_files.sync_path, tmp_path)
        await asyncio.sleep(0.0 if number % 20 else 0.2)
    await watched.end()
    await transport.close()
    assert watched.lines == []
    assert not {str(StatusFigure.DISK_SYNC_S), str(StatusFigure.NATS_STORE_S)} & watched.board.snapshot().figures.keys()
