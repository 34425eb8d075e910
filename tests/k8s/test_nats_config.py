"""The rendered NATS configuration, given to the real server: valid, equal to the embedded server's
where it must be, and a cluster of three with TLS in which a role may do its own work and nothing
else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nats.errors
import pytest
import yaml

from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import (
    POLICY_KEY,
    VERIFIER_CONSUMER,
    node_rollouts,
    node_rollouts_stream,
    node_scored,
    node_scored_stream,
)
from shared.runtime.exits import EXIT_CONFIG
from shared.transport.base import AccessDenied, NotConnected, Transport, TransportError
from shared.transport.connect import connect
from shared.transport.nats.pull import fetch
from swarm_cli.installation import NATS_CONFIG
from tests.k8s.manifests import K8S, Object, environment, find, nats_files, pod_of, render
from tests.nats_server import find_binary, free_port
from tests.secured_server import swarm

START_TIMEOUT_S = 120.0
NODES = ("alpha", "beta", "gamma")


def configuration(objects: tuple[Object, ...], folder: Path) -> tuple[Path, dict[str, str]]:
    """The files as the pod has them, under `folder` instead of `/`, and the server's environment.
    Secrets are not among them.
    """
    (folder / "etc/nats").mkdir(parents=True)
    for name in ("data", "run/nats"):
        (folder / name).mkdir(parents=True)
    for name, text in nats_files(objects).items():
        for path in ("/data", "/run/nats", "/etc/nats-tls"):
            text = text.replace(f": {path}", f": {folder}{path}")
        (folder / "etc/nats" / name).write_text(text)
    container = pod_of(find(objects, "StatefulSet", "nats"))["containers"][0]
    told = {name: value or "nats-0" for name, value in environment(objects, container).items()}
    return folder / "etc/nats/nats.conf", told


def secrets(folder: Path, keys: Path) -> None:
    """Return what the server's pod mounts, from the objects that `swarm k8s secrets` made."""
    made = {each["metadata"]["name"]: each["data"] for each in yaml.safe_load_all((keys / "secrets.yaml").read_text())}
    for name, path in (("nats-accounts", "etc/nats-accounts"), ("nats-server-tls", "etc/nats-tls")):
        (folder / path).mkdir()
        for key, value in made[name].items():
            (folder / path / key).write_bytes(base64.b64decode(value))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    swarm("k8s", "secrets", "--nodes", ",".join(NODES), "--keys", str(folder), "--out", str(folder / "secrets.yaml"))
    return folder


@pytest.mark.parametrize("variant", ["single-box", "cluster", "cluster-without-tls", "cluster-one-server"])
def test_the_server_takes_its_configuration(variant: str, tmp_path: Path, keys: Path) -> None:
    objects = render(variant)
    file, told = configuration(objects, tmp_path)
    if "nats-accounts" in (tmp_path / "etc/nats/clients.conf").read_text().partition("include")[2]:
        secrets(tmp_path, keys)
    done = subprocess.run(
        [find_binary(), "-t", "-c", str(file)], env=os.environ | told, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0 and "is valid" in done.stderr, done.stderr


@pytest.mark.parametrize("left", [0.0, 0.5, 0.9], ids=["empty", "half", "cut short"])
def test_a_server_whose_accounts_are_missing_does_not_start(left: float, tmp_path: Path, keys: Path) -> None:
    """It would take everybody as a client, with all rights."""
    file, told = configuration(render("cluster"), tmp_path)
    secrets(tmp_path, keys)
    accounts = tmp_path / "etc/nats-accounts/accounts.conf"
    lines = accounts.read_text().splitlines(keepends=True)
    accounts.write_text("".join(lines[: int(left * len(lines))]))
    done = subprocess.run(
        [find_binary(), "-t", "-c", str(file)], env=os.environ | told, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode != 0 and "is valid" not in done.stderr, done.stderr


def test_what_the_embedded_server_this_one_and_a_written_one_say_is_the_same(keys: Path) -> None:
    here = (K8S / "base/nats/nats.conf").read_text()
    there = NATS_CONFIG.read_text()
    written = swarm("nats", "config", "--plane", "both", "--nodes", ",".join(NODES), "--folder", str(keys))
    for name in ("max_payload", "max_pending", "sync_interval"):
        values = [re.findall(rf"^\s*{name}: (\S+)$", text, re.MULTILINE) for text in (here, there, written)]
        assert values[0] == values[1] == values[2] != [], name
    assert all("js_ack_fc_v2: false" in text for text in (here, there, written))


@dataclass
class Server:
    """One of the cluster's servers, as its pod runs it."""

    folder: Path
    command: list[str]
    environment: dict[str, str]
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, env=os.environ | self.environment, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[list[Server]]:
    """Three servers of the cluster overlay on this machine: other ports and folders, all else as
    rendered.
    """
    objects = render("cluster")
    ports = {(index, port): free_port() for index in range(3) for port in (4222, 6222, 8222)}
    servers = []
    for index in range(3):
        folder = tmp_path_factory.mktemp(f"nats-{index}")
        file, told = configuration(objects, folder)
        secrets(folder, keys)
        for path in (folder / "etc/nats").iterdir():
            text = path.read_text().replace("0.0.0.0", "127.0.0.1")
            for other in range(3):
                text = text.replace(f"nats-{other}.nats-headless:6222", f"127.0.0.1:{ports[other, 6222]}")
            for port in (4222, 8222):
                text = text.replace(f": {port}\n", f": {ports[index, port]}\n").replace(f":{port}\n", f":{ports[index, port]}\n")
            path.write_text(text.replace("port: 6222", f"host: 127.0.0.1\n  port: {ports[index, 6222]}"))
        told |= {"POD_NAME": f"nats-{index}", "NATS_MAX_FILE_STORE": "90GB"}
        servers.append(Server(folder, [find_binary(), "--config", str(file)], told, ports[index, 4222]))
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        if server.process is not None:
            server.process.kill()
            server.process.wait()


async def as_user(servers: list[Server], keys: Path, node: str, role: str, key: str, timeout_s: float = 10.0) -> Transport:
    return await connect(
        ",".join(f"tls://127.0.0.1:{server.port}" for server in servers),
        name=f"{node}-{role}",
        timeout_s=timeout_s,
        key_file=str(keys / key) if key else None,
        ca_file=str(keys / "ca.crt"),
        inbox_prefix=f"_INBOX_{node}.{role}",
    )


async def make_streams(operator: Transport, cluster: list[Server]) -> None:
    """As the operator does. A new cluster needs a while to choose its leaders; so does a stream
    whose number of copies was just changed: what is published meanwhile may go unanswered.
    """
    connection = operator.connection.client  # type: ignore[attr-defined]
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            await ensure_node_streams(operator, "alpha", replicas=3)
            break
        except TransportError:
            assert time.monotonic() < deadline, cluster[0].log[-3000:]
    for stream in (node_rollouts_stream("alpha"), node_scored_stream("alpha"), "KV_node_alpha"):
        while True:
            copies = {}
            with contextlib.suppress(nats.errors.Error):
                told = await connection.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=5)
                copies = json.loads(told.data).get("cluster", {})
            if copies.get("leader") and [each["current"] for each in copies.get("replicas", [])] == [True, True]:
                break
            assert time.monotonic() < deadline, (copies, cluster[0].log[-3000:])
            await asyncio.sleep(0.1)


async def test_three_servers_form_a_cluster_that_keeps_each_stream_three_times_and_each_role_to_its_own(
    cluster: list[Server], keys: Path
) -> None:
    operator = await as_user(cluster, keys, "alpha", "operator", "alpha/operator.nk")
    await make_streams(operator, cluster)
    generator = await as_user(cluster, keys, "alpha", "generator", "alpha/generator.nk")
    stored = await generator.publish(node_rollouts("alpha"), b"group", stream=node_rollouts_stream("alpha"), message_id="draw-0")
    assert stored.seq == 1
    with pytest.raises(TransportError):
        await generator.publish(node_scored("alpha"), b"forged", stream=node_scored_stream("alpha"), message_id="1", timeout_s=1.0)
    other = await as_user(cluster, keys, "beta", "generator", "beta/generator.nk")
    with pytest.raises(TransportError):
        await other.publish(node_rollouts("alpha"), b"group", stream=node_rollouts_stream("alpha"), message_id="1", timeout_s=1.0)
    with pytest.raises((AccessDenied, NotConnected)):
        await as_user(cluster, keys, "alpha", "stranger", "", timeout_s=3.0)
    for transport in (operator, generator, other):
        await transport.close()


async def test_every_key_that_a_pod_mounts_opens_the_servers_for_its_role(
    cluster: list[Server], keys: Path, tmp_path: Path
) -> None:
    """From the Secrets as they are applied, over TLS by the authority in the ConfigMap."""
    made = {each["metadata"]["name"]: each for each in yaml.safe_load_all((keys / "secrets.yaml").read_text())}
    authority = tmp_path / "ca.crt"
    authority.write_text(made["nats-ca"]["data"]["ca.crt"])
    tried = set()
    for name, each in made.items():
        for key in each["data"] if each["kind"] == "Secret" and not name.endswith("-signing") else ():
            if not key.endswith(".nk"):
                continue
            file = tmp_path / f"{name}-{key}"
            file.touch(0o600)
            file.write_bytes(base64.b64decode(each["data"][key]))
            connected = await connect(
                ",".join(f"tls://127.0.0.1:{server.port}" for server in cluster),
                name=name,
                timeout_s=START_TIMEOUT_S,
                key_file=str(file),
                ca_file=str(authority),
                inbox_prefix=f"_INBOX_{name}",
            )
            await connected.close()
            tried.add((name, key))
    assert len(tried) == 6 * len(NODES) + 2, "five roles and the swarm key of each node, the swarm's operator and the watch"


async def test_init_without_the_pods_environment_refuses_to_leave_one_copy_of_three(cluster: list[Server], keys: Path) -> None:
    """`nats.replicas` defaults to 1, and only the pods' environment says 3."""
    operator = await as_user(cluster, keys, "alpha", "operator", "alpha/operator.nk")
    await make_streams(operator, cluster)
    connection = operator.connection  # type: ignore[attr-defined]

    async def copies() -> int:
        answer = await connection.client.request(f"$JS.API.STREAM.INFO.{node_rollouts_stream('alpha')}", b"", timeout=5)
        return int(json.loads(answer.data)["config"]["num_replicas"])

    def init(*flags: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "SWARM_NODE__ID": "alpha",
            "SWARM_NATS__NODE_URL": f"tls://127.0.0.1:{cluster[0].port}",
            "SWARM_NATS__NODE_CA_FILE": str(keys / "ca.crt"),
        }
        command = [sys.executable, "-m", "swarm_cli", "nats", "init", "--plane", "node", "--key", str(keys / "alpha/operator.nk")]
        return subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, timeout=180, check=False)

    refused = await asyncio.to_thread(init)
    assert refused.returncode == EXIT_CONFIG, refused.stderr
    assert "num_replicas from 3 to 1" in refused.stderr
    assert "--lower" in refused.stderr and "nats.replicas" in refused.stderr
    assert "all streams exist" not in refused.stdout
    assert await copies() == 3
    await ensure_node_streams(operator, "alpha", replicas=1)  # as a service with the default would
    assert await copies() == 3
    lowered = await asyncio.to_thread(init, "--lower")
    assert lowered.returncode == 0, lowered.stderr
    assert await copies() == 1
    await ensure_node_streams(operator, "alpha", replicas=3)
    assert await copies() == 3
    await operator.close()


async def test_in_a_cluster_a_reply_subject_leads_nowhere_whichever_server_holds_the_stream(
    cluster: list[Server], keys: Path
) -> None:
    """The generator asks each server for the message it stored, to be sent to where it may not
    write.
    """
    operator = await as_user(cluster, keys, "alpha", "operator", "alpha/operator.nk")
    await make_streams(operator, cluster)
    rollouts, bucket = node_rollouts_stream("alpha"), "node_alpha"
    await operator.kv.put(bucket, POLICY_KEY, b"the trainer's")
    for index, server in enumerate(cluster):
        generator = await as_user([server], keys, "alpha", "generator", "alpha/generator.nk")
        stored = await generator.publish(node_rollouts("alpha"), b"forged", stream=rollouts, message_id=f"forged-{index}")
        connection = generator.connection.client  # type: ignore[attr-defined]
        for target in (f"$KV.{bucket}.{POLICY_KEY}", f"$JS.API.STREAM.PURGE.{rollouts}", f"$JS.API.STREAM.DELETE.{rollouts}"):
            for form in (b'{"seq": %d}', b'{"seq": %d, "batch": 1}'):
                await connection.publish(f"$JS.API.DIRECT.GET.{rollouts}", form % stored.seq, reply=target)
        await connection.flush()
        await asyncio.sleep(0.3)
        assert await generator.get(rollouts, stored.seq) is not None
        await generator.close()
    pointer = await operator.kv.get(bucket, POLICY_KEY)
    assert pointer is not None and pointer.value == b"the trainer's"
    await operator.close()


async def test_in_a_cluster_a_verifier_takes_its_work_from_any_server(cluster: list[Server], keys: Path) -> None:
    operator = await as_user(cluster, keys, "alpha", "operator", "alpha/operator.nk")
    await make_streams(operator, cluster)
    rollouts = node_rollouts_stream("alpha")
    for index, server in enumerate(cluster):
        generator = await as_user([cluster[index - 1]], keys, "alpha", "generator", "alpha/generator.nk")
        verifier = await as_user([server], keys, "alpha", "verifier", "alpha/verifier.nk")
        await generator.publish(node_rollouts("alpha"), b"work", stream=rollouts, message_id=f"work-{index}")
        deadline, taken = time.monotonic() + START_TIMEOUT_S, 0
        while (await verifier.stream_state(rollouts)).messages and time.monotonic() < deadline:
            for delivery in await fetch(verifier, rollouts, VERIFIER_CONSUMER, 10, 1.0):
                await delivery.ack()
                taken += 1
        assert taken >= 1
        await generator.close()
        await verifier.close()
    await operator.close()


def first_signal_read(server: Server) -> None:
    """A kubelet needs some time to see that the command ended. A busy server to which both signals
    come in the same instant may act on SIGTERM alone.
    """
    deadline = time.monotonic() + 10.0
    while "lame duck" not in server.log and time.monotonic() < deadline:
        time.sleep(0.02)


async def messages_in(operator: Transport, stream: str) -> int:
    """Asked until the stream has a leader again."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return (await operator.stream_state(stream)).messages
        except NotConnected:
            assert time.monotonic() < deadline


async def test_a_server_in_lame_duck_mode_ends_by_itself_within_the_pods_grace_period_and_nothing_is_lost(
    cluster: list[Server], keys: Path
) -> None:
    """The preStop command as written, and the signal that follows it."""
    nats = find(render("cluster"), "StatefulSet", "nats")
    leaving = cluster[2]
    assert leaving.process is not None
    operator = await as_user(cluster, keys, "alpha", "operator", "alpha/operator.nk")
    generator = await as_user([leaving], keys, "alpha", "generator", "alpha/generator.nk")
    await make_streams(operator, cluster)
    await generator.publish(node_rollouts("alpha"), b"group", stream=node_rollouts_stream("alpha"), message_id="draw-1")
    before = await operator.stream_state(node_rollouts_stream("alpha"))
    _, flag, told = pod_of(nats)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    started = time.monotonic()
    subprocess.run([find_binary(), flag, told.replace("=/", f"={leaving.folder}/")], check=True, timeout=180)  # noqa: ASYNC221
    await asyncio.to_thread(first_signal_read, leaving)
    leaving.process.send_signal(signal.SIGTERM)
    # A pod gets this once; a test's machine may be several times as slow.
    await asyncio.to_thread(leaving.process.wait, 4 * pod_of(nats)["terminationGracePeriodSeconds"])
    assert "lame duck" in leaving.log
    print(f"ended {time.monotonic() - started:.1f} s after preStop")
    assert await messages_in(operator, node_rollouts_stream("alpha")) == before.messages >= 1
    await generator.close()
    await operator.close()
