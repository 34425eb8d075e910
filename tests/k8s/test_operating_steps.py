"""The numbered steps of docs/operations.md for upgrading and restoring NATS, done to three servers
from the rendered configuration: what `kubectl` makes a controller do is done here by hand."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import sys
import time
from pathlib import Path
from subprocess import DEVNULL

import pytest

from shared.contracts.subjects import node_rollouts, node_rollouts_stream
from shared.transport.base import Transport, TransportError
from swarm_cli.replace_file import replace_file
from tests.k8s.manifests import K8S
from tests.k8s.test_nats_config import NODES, Server, as_user, cluster, keys, make_streams
from tests.secured_server import swarm

__all__ = ["cluster", "keys"]
DEADLINE_S = 90.0
STREAM = node_rollouts_stream("alpha")


def steps(heading: str, after: str = "") -> list[str]:
    """The numbered steps of a section, each on one line."""
    section = (K8S.parent / "docs/operations.md").read_text().split(f"\n{heading}\n")[1].split("\n## ")[0]
    listed = section[section.index(after) :].split("\n\n", 2 if after else 1)[1 if after else 0] if after else section
    return [" ".join(each.split()) for each in re.findall(r"^\d\. (.+(?:\n   .+)*)", listed, re.MULTILINE)]


def healthy(server: Server) -> bool:
    """`curl localhost:8222/healthz`: ok once every stream of the server is caught up."""
    found = re.search(r"^http: 127\.0\.0\.1:(\d+)$", (server.folder / "etc/nats/nats.conf").read_text(), re.MULTILINE)
    assert found is not None
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def end(server: Server) -> None:
    """Delete the pod; lame-duck mode has a test of its own (`test_nats_config`)."""
    assert server.process is not None
    server.process.terminate()
    server.process.wait(DEADLINE_S)


def until_healthy(server: Server) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not healthy(server):
        assert time.monotonic() < deadline, server.log[-3000:]
        time.sleep(0.1)


def wipe(server: Server) -> None:
    """Delete the claim: the volume comes back empty."""
    shutil.rmtree(server.folder / "data")
    (server.folder / "data").mkdir()


async def replicas_that_are_current(operator: Transport) -> int:
    """Copies of the stream that have all of it."""
    answer = await operator._connection.client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"", timeout=5)  # type: ignore[attr-defined]
    others = json.loads(answer.data).get("cluster", {}).get("replicas", [])
    return 1 + sum(bool(each.get("current")) and not each.get("offline") for each in others)


async def until_three_copies(operator: Transport, messages: int) -> None:
    deadline, found = time.monotonic() + DEADLINE_S, (0, 0)
    while found != (3, messages):
        assert time.monotonic() < deadline, found
        try:
            found = await replicas_that_are_current(operator), (await operator.stream_state(STREAM)).messages
        except (TransportError, TimeoutError, OSError):
            await asyncio.sleep(0.1)


async def init(keys: Path, server: Server) -> None:
    """What the operator's pod does when it starts."""
    environment = {
        "SWARM_NODE__ID": "alpha",
        "SWARM_NATS__NODE_URL": f"tls://127.0.0.1:{server.port}",
        "SWARM_NATS__NODE_CA_FILE": str(keys / "ca.crt"),
        "SWARM_NATS__REPLICAS": "3",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(K8S.parent),
    }
    command = ["-m", "swarm_cli", "nats", "init", "--plane", "node", "--key", str(keys / "alpha/operator.nk")]
    deadline = time.monotonic() + DEADLINE_S
    while True:  # Kubernetes starts it again until it succeeds
        process = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment, stdout=DEVNULL)
        if await asyncio.wait_for(process.wait(), DEADLINE_S) == 0:
            return
        assert time.monotonic() < deadline, server.log[-3000:]


def test_the_page_has_the_steps_that_are_done_here() -> None:
    upgrade, one, every = steps("## Upgrading"), steps("## Restoring NATS", "**One"), steps("## Restoring NATS", "**All")
    assert [len(each) for each in (upgrade, one, every)] == [5, 3, 4], (upgrade, one, every)
    for step, words in zip(
        upgrade, ("make images", "swarm nats config", "apply -k", "rollout status", "swarm status"), strict=True
    ):
        assert words in step
    for step, words in zip(one, ("delete pvc data-nats-2", "delete pod nats-2", "/healthz"), strict=True):
        assert words in step
    for step, words in zip(every, ("--replicas=0", "delete pvc", "rollout restart", "apply -k"), strict=True):
        assert words in step


@pytest.mark.slow
async def test_an_upgrade_loses_nothing_and_lost_volumes_are_filled_again(cluster: list[Server], keys: Path) -> None:
    operator = await as_user(cluster, keys, "alpha", "operator", "alpha/operator.nk", timeout_s=DEADLINE_S)
    generator = await as_user(cluster, keys, "alpha", "generator", "alpha/generator.nk", timeout_s=DEADLINE_S)
    await make_streams(operator, cluster)
    for number in range(3):
        await generator.publish(node_rollouts("alpha"), b"group", stream=STREAM, message_id=f"draw-{number}", timeout_s=DEADLINE_S)

    # Upgrading: accounts written anew, then one server after the other, each once the one before
    # has caught up (the startup probe asks /healthz).
    which = ("--plane", "both", "--nodes", ",".join(NODES), "--node-connections", "20", "--folder", str(keys))
    accounts = await asyncio.to_thread(swarm, "nats", "config", "--accounts-only", *which)
    for server in reversed(cluster):
        replace_file(server.folder / "etc/nats-accounts/accounts.conf", accounts)
    for server in reversed(cluster):
        await asyncio.to_thread(end, server)
        server.start()
        await asyncio.to_thread(until_healthy, server)
    await init(keys, cluster[0])
    await until_three_copies(operator, messages=3)

    # One server's volume is lost.
    await asyncio.to_thread(end, cluster[2])
    wipe(cluster[2])
    cluster[2].start()
    await asyncio.to_thread(until_healthy, cluster[2])
    await until_three_copies(operator, messages=3)

    # All are lost.
    for server in cluster:
        await asyncio.to_thread(end, server)
        wipe(server)
    for server in cluster:
        server.start()
    await init(keys, cluster[0])
    await until_three_copies(operator, messages=0)
    await generator.publish(node_rollouts("alpha"), b"group", stream=STREAM, message_id="draw-9", timeout_s=DEADLINE_S)
    await generator.close()
    await operator.close()
