"""Three clustered servers: the leader of a stream is killed and brought back, again and again,
while others publish to it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import nats

from shared.contracts.streams import ensure_node_streams
from shared.transport.base import TransportError
from shared.transport.connect import connect
from tests.chaos.figures import Row, note
from tests.chaos.publishing import Load, load_stream, lost_and_duplicated, stored_ids
from tests.chaos.scale import SCALE
from tests.chaos.servers import Cluster

LONGEST_PAUSE_S = 10.0
PUBLISHERS = 3
DOWN_S = 1.0


async def leader(client: Any, stream: str) -> str | None:
    """The server that leads the stream, once it has both followers up to date."""
    try:
        cluster = (await client.jetstream(timeout=1).stream_info(stream)).cluster
    except Exception:
        return None
    if cluster is None or not cluster.leader or any(not peer.current or peer.offline for peer in cluster.replicas or []):
        return None
    return str(cluster.leader)


async def eventually(attempt: Any, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        found = await attempt()
        if found is not None:
            return found
        assert time.monotonic() < deadline, f"the cluster was not whole within {timeout_s} s"
        await asyncio.sleep(0.1)


async def _run(folder: Path) -> None:
    cluster = Cluster(folder).start()
    try:
        transports = [await connect(cluster.url, name=f"chaos-{number}") for number in range(PUBLISHERS)]

        async def set_up() -> bool | None:
            try:
                await ensure_node_streams(transports[0], "alpha", replicas=3)
                await transports[0].ensure_stream(load_stream(replicas=3))
            except TransportError:
                return None
            return True

        await eventually(set_up, 120)
        observer = await nats.connect(cluster.url.split(","), max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        loads = [Load(transport, f"p{number}") for number, transport in enumerate(transports)]
        publishing = [asyncio.create_task(load.run()) for load in loads]
        killed = []
        for _ in range(SCALE.leader_kills):
            name = await eventually(lambda: leader(observer, "CHAOS_LOAD"), 120)
            await asyncio.sleep(1.0)
            cluster.servers[name].kill()
            killed.append(name)
            await cluster.restart(name, DOWN_S)
        await eventually(lambda: leader(observer, "CHAOS_LOAD"), 120)
        await asyncio.sleep(0.5)
        for load in loads:
            load.stop()
        await asyncio.gather(*publishing)
        acknowledged = [message_id for load in loads for message_id in load.acknowledged]
        lost, duplicated = lost_and_duplicated(acknowledged, await stored_ids(transports[0]))
        pauses = [load.longest_pause_s() for load in loads]
        await observer.close()
        for transport in transports:
            await transport.close()
    finally:
        cluster.kill()
    note(
        Row(
            fault="kill -9 of the stream's leader, one of three clustered servers",
            injected=len(killed),
            counted="messages published",
            sent=len(acknowledged),
            lost=lost,
            duplicated=duplicated,
            recovery_s=pauses,
            remark="recovery: longest pause of each publisher",
        )
    )
    assert len(acknowledged) > 50 * SCALE.leader_kills
    assert (lost, duplicated) == (0, 0)
    assert max(pauses) <= LONGEST_PAUSE_S


def test_a_killed_leader_of_three_costs_seconds_and_no_acknowledged_message(tmp_path: Path) -> None:
    asyncio.run(_run(tmp_path))
