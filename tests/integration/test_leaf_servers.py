"""A site with a leaf server of its own: its streams stay when the hub goes, and the swarm's are
reached through it, by domain.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.transport.base import Transport, TransportError
from shared.transport.connect import connect
from tests.nats_server import NatsServer, find_binary, free_port

REPO = Path(__file__).resolve().parents[2]
HUB = "hub"


def _site(make: Callable[..., NatsServer]) -> tuple[NatsServer, NatsServer]:
    leaf_port = free_port()
    hub = make(config=f"server_name: hub\nleafnodes {{ host: 127.0.0.1, port: {leaf_port} }}", jetstream=f"domain: {HUB}")
    leaf = make(
        config=f'server_name: site\nleafnodes {{ reconnect: "1s", remotes: [ {{ url: "nats://127.0.0.1:{leaf_port}" }} ] }}',
        jetstream="domain: site",
    )
    return hub, leaf


async def _until_works(action: Callable[[], object], timeout_s: float = 20.0) -> float:
    started = time.monotonic()
    while True:
        try:
            await action()  # type: ignore[misc]
            return time.monotonic() - started
        except TransportError:
            if time.monotonic() - started > timeout_s:
                raise
            await asyncio.sleep(0.1)


async def _share(swarm: Transport, node: str, text: str) -> None:
    await swarm.publish(subjects.rollouts(node), text.encode(), stream=subjects.SWARM_ROLLOUTS, message_id=text, timeout_s=2.0)


async def _shared(swarm: Transport) -> list[bytes]:
    return [await swarm.payload(message) for message in await swarm.read(subjects.SWARM_ROLLOUTS, 1, 100)]


async def test_a_site_shares_through_its_leaf_and_works_on_without_the_hub(nats_server: Callable[..., NatsServer]) -> None:
    hub, leaf = _site(nats_server)
    node = f"leaf-{uuid.uuid4().hex[:6]}"
    own = await connect(leaf.url, name="own")
    swarm = await connect(leaf.url, name="swarm", domain=HUB)
    elsewhere = await connect(hub.url, name="elsewhere")
    await ensure_node_streams(own, node)
    await _until_works(lambda: ensure_swarm_streams(swarm))

    await _share(swarm, node, "first")
    assert await _shared(elsewhere) == [b"first"], "what a site shares lies in the hub's stream"
    await _share(elsewhere, "other", "second")
    assert await _shared(swarm) == [b"first", b"second"], "and what others share is read through the leaf"
    with pytest.raises(TransportError):
        await own.stream_state(subjects.SWARM_ROLLOUTS)
    await swarm.kv.put(subjects.SWARM_NODES_BUCKET, node, b"here")
    assert [entry.key for entry in (await elsewhere.kv.newest(subjects.SWARM_NODES_BUCKET, 1024))[0]] == [node]

    hub.kill()
    with pytest.raises(TransportError):
        await _share(swarm, node, "while away")
    stored = await own.publish(
        subjects.node_scored(node), b"own work goes on", stream=subjects.node_scored_stream(node), message_id="own"
    )
    assert stored.seq == 1

    hub.start()
    seconds = await _until_works(lambda: _share(swarm, node, "after"))
    assert (await _shared(swarm))[-1] == b"after"
    assert seconds < 20.0
    for transport in (own, swarm, elsewhere):
        await transport.close()


async def test_large_groups_pass_the_leaf_in_chunks(nats_server: Callable[..., NatsServer]) -> None:
    hub, leaf = _site(nats_server)
    swarm = await connect(leaf.url, name="swarm", domain=HUB)
    await _until_works(lambda: ensure_swarm_streams(swarm))
    large = bytes(range(256)) * 16_384
    await swarm.publish(subjects.rollouts("site"), large, stream=subjects.SWARM_ROLLOUTS, message_id="large")
    elsewhere = await connect(hub.url, name="elsewhere")
    assert await _shared(elsewhere) == [large]
    await swarm.close()
    await elsewhere.close()


def test_the_shipped_configurations_of_hub_and_site_are_valid() -> None:
    for name in ("hub", "site"):
        command = [find_binary(), "-t", "-c", str(REPO / "config" / "leaf" / f"{name}.conf")]
        environment = {**os.environ, "SWARM_HUB_URL": "nats://127.0.0.1:7422"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr
