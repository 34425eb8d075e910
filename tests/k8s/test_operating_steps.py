"""The numbered steps of the pages on Kubernetes for upgrading and restoring NATS, done to three
servers from the rendered configuration: what `kubectl` makes a controller do is done here by hand.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL

import pytest

from shared.contracts.subjects import POLICY_KEY, VERIFIER_CONSUMER, node_rollouts, node_rollouts_stream
from shared.transport.base import Transport, TransportError
from shared.transport.nats.pull import Delivery, fetch
from swarm_cli.nats.commands import update_swarm_streams
from swarm_cli.replace_file import replace_file
from tests.k8s.manifests import K8S, environment, find, kubernetes_pages, pod_of, render
from tests.k8s.test_nats_config import NODES, Server, as_user, cluster, keys, make_streams
from tests.k8s.test_operator_commands import as_operator, run
from tests.secured_server import swarm

__all__ = ["cluster", "keys"]
DEADLINE_S = 180.0
STREAM = node_rollouts_stream("alpha")


def steps(heading: str, after: str = "") -> list[str]:
    """The numbered steps of a section, each on one line."""
    section = kubernetes_pages().split(f"\n{heading}\n")[1].split("\n## ")[0]
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
    answer = await operator.connection.client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"", timeout=5)  # type: ignore[attr-defined]
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
    """Do what the operator's pod does when it starts."""
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


class OperatorPods:
    """What the pages run with `kubectl exec` in the two operators' pods, with their environment and
    keys; their volumes are folders here."""

    def __init__(self, folder: Path, keys: Path, servers: list[Server]) -> None:
        objects = render("cluster")
        self._folders = {"alpha": folder / "alpha", "swarm": folder / "swarm"}
        for each in self._folders.values():
            each.mkdir()
        container = pod_of(find(objects, "Deployment", "swarm-operator"))["containers"][0]
        told = {name: str(value) for name, value in environment(objects, container).items()}
        urls = ",".join(f"tls://127.0.0.1:{server.port}" for server in servers)
        files = {"tls://nats:4222": urls, "/etc/swarm-ca": str(keys), "/etc/swarm-operator": str(keys / "operator")}
        for said, meant in files.items():
            told = {name: value.replace(said, meant) for name, value in told.items()}
        self._told = {"alpha": as_operator(objects, self._folders["alpha"], keys, servers), "swarm": told}

    def do(self, step: str, *more: str, pod: str = "alpha") -> str:
        """The command of a step, which has to succeed; what it said."""
        code, said = self.try_to(step, *more, pod=pod)
        assert code == 0, said
        return said

    def try_to(self, step: str, *more: str, pod: str = "alpha") -> tuple[int, str]:
        """Its exit code and what it said."""
        found = re.search(r"`kubectl -n swarm exec (?:-i )?deploy/(\w+)-operator -- ([^`]+)`", step)
        assert found is not None and found[1] in (pod, "alpha"), step
        command, folder = found[2], self._folders[pod]
        command = re.sub(r"(?<= )(/var/lib/swarm|/tmp)(?=[ /])", str(folder / "volume"), command).replace(
            "alpha-nats.tar", f"{folder}/nats.tar"
        )
        (folder / "volume").mkdir(exist_ok=True)
        if command.startswith("swarm "):
            return run([*shlex.split(command)[1:], *more], self._told[pod])
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        return done.returncode, done.stderr


def test_the_page_has_the_steps_that_are_done_here() -> None:
    upgrade, one, every = steps("## Upgrading"), steps("## Restoring NATS", "**One"), steps("## Restoring NATS", "**All")
    saving = steps("## Backup of NATS")
    assert [len(each) for each in (upgrade, one, every, saving)] == [5, 3, 7, 6], (upgrade, one, every, saving)
    for step, words in zip(
        upgrade, ("make images", "swarm nats config", "apply -k", "rollout status", "swarm status"), strict=True
    ):
        assert words in step
    for step, words in zip(one, ("delete pvc data-nats-2", "delete pod nats-2", "/healthz"), strict=True):
        assert words in step
    again = ("--replicas=0", "delete pvc", "rollout restart", "tar x", "swarm nats restore", "swarm nats report", "apply -k")
    for step, words in zip(every, again, strict=True):
        assert words in step
    whole = ("trainer's volume", "swarm nats report", "swarm nats backup", "tar c", "rm -r", "--plane swarm")
    for step, words in zip(saving, whole, strict=True):
        assert words in step


@pytest.mark.slow
async def test_an_upgrade_loses_nothing_and_lost_volumes_are_filled_again_from_the_others_or_from_a_backup(
    cluster: list[Server], keys: Path, tmp_path: Path
) -> None:
    pods = OperatorPods(tmp_path, keys, cluster)
    saving, again = steps("## Backup of NATS"), steps("## Restoring NATS", "**All")
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

    # Backup of NATS.
    verifier = await as_user(cluster, keys, "alpha", "verifier", "alpha/verifier.nk", timeout_s=DEADLINE_S)
    (delivery,) = await fetch(verifier, STREAM, VERIFIER_CONSUMER, 1, DEADLINE_S)
    await delivery.ack()
    await until_three_copies(operator, messages=2)
    await operator.kv.put("node_alpha", POLICY_KEY, b"version 7")
    await asyncio.to_thread(pods.do, saving[1])
    said = await asyncio.to_thread(pods.do, saving[2])
    kept = said.split()[-1]
    for step in saving[3:5]:
        await asyncio.to_thread(pods.do, step)
    assert not list((tmp_path / "alpha/volume").iterdir())
    swarms = await as_user(cluster, keys, "swarm", "operator", "operator/swarm.nk", timeout_s=DEADLINE_S)
    await update_swarm_streams(swarms, replicas=3)
    await swarms.close()
    assert "KV_swarm_nodes" in await asyncio.to_thread(pods.do, saving[5], pod="swarm")

    # One server's volume is lost.
    await asyncio.to_thread(end, cluster[2])
    deadline = time.monotonic() + DEADLINE_S
    while "nats-2 is offline" not in (found := await asyncio.to_thread(pods.try_to, saving[1]))[1] or found[0] != 1:
        assert time.monotonic() < deadline, found
    wipe(cluster[2])
    cluster[2].start()
    await asyncio.to_thread(until_healthy, cluster[2])
    await until_three_copies(operator, messages=2)

    # All are lost.
    for server in cluster:
        await asyncio.to_thread(end, server)
        wipe(server)
    for server in cluster:
        server.start()
    await init(keys, cluster[0])
    await until_three_copies(operator, messages=0)
    await asyncio.to_thread(pods.do, again[3])
    assert "sha256sum /var/lib/swarm/nats-backup/backup.json" in again[3]
    assert hashlib.sha256((tmp_path / "alpha/volume/nats-backup/backup.json").read_bytes()).hexdigest() == kept
    said = await asyncio.to_thread(pods.do, again[4])
    assert f"{STREAM}: 2 messages up to 3 restored and compared" in said
    await until_three_copies(operator, messages=2)
    deadline = time.monotonic() + DEADLINE_S
    while (found := await asyncio.to_thread(pods.try_to, again[5]))[0] != 0:
        assert time.monotonic() < deadline, found
    # The services go on: a number that was never used, what nobody had scored, what was known.
    stored = await generator.publish(node_rollouts("alpha"), b"group", stream=STREAM, message_id="draw-9", timeout_s=DEADLINE_S)
    taken = list[Delivery]()
    deadline = time.monotonic() + DEADLINE_S
    while len(taken) < 3 and time.monotonic() < deadline:
        taken += await fetch(verifier, STREAM, VERIFIER_CONSUMER, 10, 5.0)
    assert stored.seq == 4 and [each.message.seq for each in taken] == [2, 3, 4]
    pointer = await operator.kv.get("node_alpha", POLICY_KEY)
    assert pointer is not None and pointer.value == b"version 7"
    await verifier.close()
    await generator.close()
    await operator.close()
