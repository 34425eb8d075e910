"""Messages as large as a member may write, on the line of a node that is slow: each is sent once,
and they hold up nobody else's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.verifier import swarm_reader
from services.verifier.fair_queue import TokenBucket
from services.verifier.figures import Figures
from services.verifier.swarm_reader import SwarmReader
from shared.contracts import subjects
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.runtime.status import StatusBoard
from shared.transport.base import Ends, NotConnected
from shared.transport.connect import connect
from shared.transport.nats.transport import NatsTransport, connection_of
from tests.integration.running_verifier import configured
from tests.integration.slow_line import slow_line
from tests.nats_server import NatsServer, own_plane

LARGE = 7 * 2**20


async def a_reader(tmp_path: Path) -> SwarmReader:
    node = await own_plane()
    await ensure_node_streams(node, "alpha")
    config = configured("alpha", "nats://127.0.0.1:1", tmp_path)
    reader = SwarmReader(config, node, Figures(CollectorRegistry(), StatusBoard("alpha", "verifier", "0")))
    reader._looks = TokenBucket(1e6, 1e6, time.monotonic())
    return reader


async def written(server: NatsServer, sizes: list[int]) -> None:
    """Messages of these sizes, in turn by mallory and beta."""
    hub = await connect(server.url, name="hub")
    await ensure_swarm_streams(hub)
    for number, size in enumerate(sizes):
        subject = subjects.rollouts("mallory" if size == LARGE else "beta")
        await hub.publish(subject, os.urandom(size), stream=subjects.SWARM_ROLLOUTS, message_id=f"m{number}", timeout_s=60.0)
    await hub.close()


async def read_until(reader: SwarmReader, url: str, last_seq: int) -> list[int]:
    plane, found, deadline = await connect(url, name="alpha", timeout_s=30.0), list[int](), time.monotonic() + 300.0
    try:
        while (not found or found[-1] < last_seq) and time.monotonic() < deadline:
            try:
                messages, _ = await reader.read(plane, 10_000, 0)
            except NotConnected:
                continue
            found += [message.seq for message in messages]
    finally:
        await plane.close()
    return found


@pytest.mark.slow
async def test_a_large_message_on_a_slow_line_is_sent_once(nats_server: Callable[..., NatsServer], tmp_path: Path) -> None:
    server = nats_server(config="max_payload: 8MB\nmax_pending: 96MB")
    sizes = [LARGE, 100, LARGE, 100]
    await written(server, sizes)
    async with slow_line(server.port, 2e6) as line:
        assert await read_until(await a_reader(tmp_path), line.url, len(sizes)) == [1, 2, 3, 4]
        assert line.received_bytes < 1.2 * sum(sizes), "what was asked for again was sent again"


class TooSlow(NatsTransport):
    """Stands in for a line on which the first message never arrives in time."""

    async def ends(self, stream: str, start_seq: int = 1, timeout_s: float = 5.0, *, newest: bool = True) -> Ends:
        if start_seq == 1:
            raise NotConnected("no answer in time")
        return await super().ends(stream, start_seq, timeout_s, newest=newest)


async def test_a_message_that_never_arrives_in_time_is_passed(tmp_path: Path) -> None:
    plane, reader = TooSlow(connection_of(await own_plane())), await a_reader(tmp_path)
    await ensure_swarm_streams(plane)
    for number in range(2):
        subject = subjects.rollouts("beta")
        await plane.publish(subject, b"group", stream=subjects.SWARM_ROLLOUTS, message_id=f"m{number}")
    for _ in range(swarm_reader.PASSED_AFTER):
        with pytest.raises(NotConnected):
            await reader.read(plane, 10_000, 0)
    messages, _ = await reader.read(plane, 10_000, 0)
    assert [message.seq for message in messages] == [2]
