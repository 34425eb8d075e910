"""`swarm nats backup` and `swarm nats restore`, against real servers: what is put back is what was
there, nothing that exists is overwritten, and a folder that somebody changed restores nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.contracts.subjects import (
    POLICY_KEY,
    VERIFIER_CONSUMER,
    node_bucket,
    node_dead_letters,
    node_dead_letters_stream,
    node_rollouts,
    node_rollouts_stream,
    node_scored,
    node_scored_stream,
)
from shared.transport.base import TransportError
from shared.transport.connect import connect
from shared.transport.deadline import Deadline
from shared.transport.nats.jetstream_api import call
from shared.transport.nats.snapshots import TransferLost, put_back, take_snapshot
from shared.transport.nats.transport import NatsTransport
from swarm_cli.app import app
from tests.nats_server import NatsServer
from tests.secured_server import SecuredServer

QUEUE, SCORED, DEAD = node_rollouts_stream("alpha"), node_scored_stream("alpha"), node_dead_letters_stream("alpha")
BUCKET = "KV_node_alpha"
LARGE = b"large group " * 200_000
"""More than one message may hold: it travels in chunks."""
DEADLINE_S = 180.0


def swarm(*words: str, url: str = "", **environment: str) -> tuple[int, str]:
    """A `swarm nats` command in this process; its exit code and all it said, on one line."""
    told = {
        "SWARM_NODE__ID": "alpha",
        **({"SWARM_NATS__NODE_URL": url, "SWARM_NATS__SWARM_URL": url} if url else {}),
        **environment,
    }
    done = CliRunner().invoke(app, ["nats", *words], env=told)
    return done.exit_code, " ".join(f"{done.output} {done.exception or ''}".split())


async def opened(url: str, **options: str) -> NatsTransport:
    transport = await connect(url, name="test", timeout_s=DEADLINE_S, **options)
    assert isinstance(transport, NatsTransport)
    return transport


async def fill(url: str) -> None:
    """A node at work: three groups waiting of which one is out and one was acknowledged, others
    scored, one of them in chunks, a position."""
    transport = await opened(url)
    await ensure_node_streams(transport, "alpha")
    await ensure_swarm_streams(transport)
    for number in range(4):
        await transport.publish(node_rollouts("alpha"), b"group %d" % number, stream=QUEUE, message_id=f"draw-{number}")
    first, second = await transport.fetch(QUEUE, VERIFIER_CONSUMER, 2, 5.0)
    await first.ack()
    await transport.publish(node_scored("alpha"), LARGE, stream=SCORED, message_id="large")
    for number in range(20):
        await transport.publish(node_scored("alpha"), os.urandom(50_000), stream=SCORED, message_id=f"scored-{number}")
    letter = await transport.publish(node_dead_letters("alpha"), b"letter", stream=DEAD, message_id="letter")
    await transport.delete(DEAD, letter.seq)
    await transport.kv.put(node_bucket("alpha"), POLICY_KEY, b"version 7")
    await transport.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("source")).start()
    asyncio.run(fill(server.url))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def saved(source: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of all its streams."""
    folder = tmp_path_factory.mktemp("backups") / "alpha"
    code, said = swarm("backup", "--out", str(folder), url=source.url)
    assert code == 0, said
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Iterator[NatsServer]:
    """A server without streams."""
    server = NatsServer(tmp_path / "target").start()
    yield server
    server.kill()


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """The backup, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "copied"))


def change(folder: Path, stream: str, **settings: object) -> None:
    """Change settings of a stream in the manifest."""
    manifest = json.loads((folder / "backup.json").read_bytes())
    (entry,) = [each for each in manifest["streams"] if each["name"] == stream]
    entry["config"] |= settings
    (folder / "backup.json").write_text(json.dumps(manifest))


async def states(url: str) -> dict[str, tuple[int, int, int, int]]:
    transport = await opened(url)
    names = [
        each["config"]["name"]
        for each in json.loads((await transport._connection.client.request("$JS.API.STREAM.LIST")).data)["streams"]
    ]
    found = {name: await transport.stream_state(name) for name in names}
    await transport.close()
    return {
        name: (each.messages, each.size_bytes, each.first_seq * bool(each.messages), each.last_seq) for name, each in found.items()
    }


def names_on(server: NatsServer) -> set[str]:
    return set(asyncio.run(states(server.url)))


async def test_a_node_goes_on_on_an_empty_server_where_its_backup_was_taken(
    source: NatsServer, saved: Path, target: NatsServer
) -> None:
    code, said = await asyncio.to_thread(swarm, "restore", str(saved), url=target.url)
    assert code == 0 and "restored and compared" in said, said
    assert await states(target.url) == await states(source.url)
    node = await opened(target.url)
    # The position: one of four groups was scored, and its number is not used again.
    waiting = await node.consumer_state(QUEUE, VERIFIER_CONSUMER)
    assert (waiting.pending + waiting.ack_pending, (await node.stream_state(QUEUE)).last_seq) == (3, 4)
    stored = await node.publish(node_rollouts("alpha"), b"group 4", stream=QUEUE, message_id="draw-4")
    assert stored.seq == 5
    entry = await node.kv.get(node_bucket("alpha"), POLICY_KEY)
    assert entry is not None and entry.value == b"version 7"
    (large,) = await node.read(SCORED, 1, 1)
    assert await node.payload(large) == LARGE
    await node.close()


def test_a_backup_is_private_has_what_refers_first_and_its_sum_is_that_of_its_manifest(saved: Path, target: NatsServer) -> None:
    manifest = json.loads((saved / "backup.json").read_bytes())
    names = [each["name"] for each in manifest["streams"]]
    assert names.index(BUCKET) < names.index(QUEUE) < names.index(SCORED) < names.index(f"{SCORED}_BLOBS")
    assert saved.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in saved.iterdir()} == {0o600}
    sha256 = hashlib.sha256((saved / "backup.json").read_bytes()).hexdigest()
    code, said = swarm("restore", str(saved), "--check", "--sha256", sha256, url=target.url)
    assert code == 0 and "nothing was changed" in said and names_on(target) == set(), said
    code, said = swarm("restore", str(saved), "--check", "--sha256", "0" * 64, url=target.url)
    assert code == 1 and "it is another backup, or it was changed" in said, said


def test_a_backup_of_some_streams_has_those_alone(source: NatsServer, tmp_path: Path) -> None:
    code, said = swarm("backup", "--out", str(tmp_path / "one"), "--stream", QUEUE, "--stream", BUCKET, url=source.url)
    assert code == 0 and {file.name for file in (tmp_path / "one").iterdir()} == {
        "backup.json",
        f"{QUEUE}.snapshot",
        f"{BUCKET}.snapshot",
    }, said
    code, said = swarm("backup", "--out", str(tmp_path / "node"), "--node", "alpha", url=source.url)
    assert code == 0 and "SWARM" not in said and SCORED in said, said
    for words, told in (
        (("--out", str(tmp_path / "one")), "not empty"),
        (("--out", str(tmp_path / "two"), "--stream", "NODE_OMEGA_SCORED"), "no stream NODE_OMEGA_SCORED"),
        (("--out", str(tmp_path / "two"), "--node", "omega"), "no stream of node omega"),
        (("--out", str(tmp_path / "two"), "--plane", "both"), "choose one plane"),
    ):
        code, said = swarm("backup", *words, url=source.url)
        assert code == 1 and told in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node", "one"]


def test_a_stream_that_exists_is_not_overwritten_and_an_empty_one_only_when_told(saved: Path, target: NatsServer) -> None:
    async def prepare(message: bytes) -> None:
        transport = await opened(target.url)
        await ensure_node_streams(transport, "alpha")
        if message:
            await transport.publish(node_scored("alpha"), message, stream=SCORED, message_id="mine")
        await transport.close()

    asyncio.run(prepare(b""))
    code, said = swarm("restore", str(saved), url=target.url)
    assert code == 1 and "never held a message" in said and "--replace-empty" in said, said
    code, said = swarm("restore", str(saved), "--replace-empty", "--stream", QUEUE, url=target.url)
    assert code == 0, said
    asyncio.run(prepare(b"mine"))
    before = asyncio.run(states(target.url))
    code, said = swarm("restore", str(saved), "--replace-empty", url=target.url)
    assert code == 1 and "not overwritten" in said and SCORED in said and QUEUE in said, said
    assert asyncio.run(states(target.url)) == before


def test_copies_are_not_cut_unless_told(copied: Path, target: NatsServer) -> None:
    change(copied, QUEUE, num_replicas=3)
    code, said = swarm("restore", str(copied), "--replicas", "1", url=target.url)
    assert code == 1 and "--lower" in said and QUEUE in said and SCORED not in said, said
    code, said = swarm("restore", str(copied), "--stream", QUEUE, url=target.url)
    assert code == 1 and "replicas" in said and "go on with: swarm nats restore" in said, said
    code, said = swarm("restore", str(copied), "--replicas", "1", "--lower", "--stream", QUEUE, url=target.url)
    assert code == 0 and names_on(target) == {QUEUE}, said


def test_a_changed_backup_restores_nothing(copied: Path, tmp_path: Path, target: NatsServer) -> None:
    manifest, file = copied / "backup.json", copied / f"{SCORED}.snapshot"
    whole, said_before = file.read_bytes(), manifest.read_text()
    secret = tmp_path / "secret"
    secret.write_bytes(whole)

    def cut() -> None:
        file.write_bytes(whole[:-1])

    def flip() -> None:
        file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])

    def lengthen() -> None:
        file.write_bytes(whole + b"x")

    def link() -> None:
        file.unlink()
        file.symlink_to(secret)

    def pipe() -> None:
        file.unlink()
        os.mkfifo(file)

    changes: dict[Callable[[], object], str] = {
        cut: "not what was backed up",
        flip: "not what was backed up",
        lengthen: "not what was backed up",
        link: "cannot be read",
        pipe: "cannot be read",
        lambda: change(copied, SCORED, republish={"src": ">", "dest": "swarm.rollouts.v2.alpha"}): "republish",
        lambda: change(copied, SCORED, sources=[{"name": "OTHER"}]): "sources",
        lambda: change(copied, SCORED, name="OTHER"): "belong to another stream",
        lambda: manifest.write_text(said_before.replace(SCORED, "../../etc/x")): "not a stream's name",
        lambda: manifest.write_text(said_before.replace('"format": 1', '"format": 2')): "format 2",
        lambda: manifest.write_text(said_before[:-40]): "not a backup's manifest",
        lambda: manifest.write_text("[" * 100_000): "not a backup's manifest",
        lambda: manifest.write_text(said_before.replace('"size_bytes": ', '"size_bytes": -')): "negative size",
        manifest.unlink: "cannot be read",
    }
    for make, told in changes.items():
        make()
        code, said = swarm("restore", str(copied), url=target.url)
        assert code == 1 and told in said, said
        file.unlink(missing_ok=True)
        file.write_bytes(whole)
        manifest.write_text(said_before)
    assert names_on(target) == set()
    code, said = swarm("restore", str(copied), url=target.url)
    assert code == 0, said


def test_a_consumer_that_the_manifest_does_not_name_takes_its_stream_with_it(copied: Path, target: NatsServer) -> None:
    """The files are opaque, so that one could hold a consumer that pushes messages elsewhere."""
    manifest = json.loads((copied / "backup.json").read_bytes())
    for entry in manifest["streams"]:
        entry["consumers"] = []
    (copied / "backup.json").write_text(json.dumps(manifest))
    code, said = swarm("restore", str(copied), "--stream", QUEUE, url=target.url)
    assert code == 1 and VERIFIER_CONSUMER in said and "removed again" in said and names_on(target) == set(), said


async def test_a_consumer_that_pushes_is_restored_from_no_backup(source: NatsServer, target: NatsServer, tmp_path: Path) -> None:
    """Not either where the manifest names it, which whoever made the backup wrote too."""
    transport = await opened(source.url)
    config = {"durable_name": "verifier", "deliver_subject": "$KV.node_alpha.policy", "ack_policy": "none", "deliver_policy": "all"}
    request = {"stream_name": SCORED, "config": config}
    await call(transport._connection, f"CONSUMER.DURABLE.CREATE.{SCORED}.verifier", request, Deadline(5.0), "a consumer")
    code, said = await asyncio.to_thread(swarm, "backup", "--out", str(tmp_path / "made"), "--stream", SCORED, url=source.url)
    await call(transport._connection, f"CONSUMER.DELETE.{SCORED}.verifier", None, Deadline(5.0), "a consumer")
    await transport.close()
    assert code == 0 and json.loads((tmp_path / "made" / "backup.json").read_bytes())["streams"][0]["consumers"], said
    code, said = await asyncio.to_thread(swarm, "restore", str(tmp_path / "made"), url=target.url)
    assert code == 1 and "push messages elsewhere" in said and not await states(target.url), said


def test_a_time_that_is_none_stops_no_restore(copied: Path, target: NatsServer) -> None:
    manifest = json.loads((copied / "backup.json").read_bytes())
    (copied / "backup.json").write_text(json.dumps(manifest | {"made_at": 1e300}))
    code, said = swarm("restore", str(copied), "--check", url=target.url)
    assert code == 0 and "made at a time that is none" in said, said


async def test_a_file_that_changes_while_it_is_sent_makes_no_stream(source: NatsServer, target: NatsServer) -> None:
    transport, parts = await opened(source.url), list[bytes]()
    taken = await take_snapshot(transport._connection, SCORED, parts.append)
    await transport.close()
    other = await opened(target.url)

    def changed() -> None:
        raise ValueError("changed")

    with pytest.raises(ValueError, match="changed"):
        await put_back(other._connection, taken.config, taken.state, parts[:3], sure=changed, timeout_s=10)
    # The server gives up by itself; then the same is restored.
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            made = await put_back(other._connection, taken.config, taken.state, parts, sure=lambda: None, timeout_s=10)
            break
        except TransportError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
    assert made["state"]["messages"] == taken.state["messages"]
    await other.close()


async def test_a_server_that_restarts_during_a_transfer_is_told_apart_from_a_refusal(
    nats_server: Callable[..., NatsServer],
) -> None:
    server = nats_server()
    await fill(server.url)
    transport, parts = await opened(server.url), list[bytes]()
    for number in range(16):  # more than is on its way at once
        await transport.publish(node_scored("alpha"), os.urandom(900_000), stream=SCORED, message_id=f"large-{number}")

    def restart_first(part: bytes) -> None:
        if not parts:
            server.restart()
        parts.append(part)

    with pytest.raises(TransferLost):
        await take_snapshot(transport._connection, SCORED, restart_first)
    # Again, now that it is back: whole.
    parts.clear()
    await transport.stream_state(SCORED)
    taken = await take_snapshot(transport._connection, SCORED, parts.append)
    await transport._connection.client.request(f"$JS.API.STREAM.DELETE.{SCORED}", b"")

    def restart_later() -> Iterator[bytes]:
        yield parts[0]
        server.restart()
        yield from parts[1:]

    with pytest.raises(TransferLost):
        await put_back(transport._connection, taken.config, taken.state, restart_later(), sure=lambda: None, timeout_s=10)
    with pytest.raises(TransportError):
        await transport.stream_state(SCORED)  # nothing half
    await put_back(transport._connection, taken.config, taken.state, parts, sure=lambda: None, timeout_s=10)
    assert (await transport.stream_state(SCORED)).messages == taken.state["messages"]
    await transport.close()


def test_a_backup_over_a_servers_restart_is_whole(
    nats_server: Callable[..., NatsServer], tmp_path: Path, target: NatsServer
) -> None:
    server = nats_server()
    asyncio.run(fill(server.url))
    began = threading.Event()

    def restart() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not list(tmp_path.glob(".saved-*/*.snapshot")) and time.monotonic() < deadline:
            time.sleep(0.001)
        began.set()
        server.restart()

    restarting = threading.Thread(target=restart)
    restarting.start()
    code, said = swarm("backup", "--out", str(tmp_path / "saved"), url=server.url)
    restarting.join(DEADLINE_S)
    assert began.is_set() and code == 0, said
    code, said = swarm("restore", str(tmp_path / "saved"), url=target.url)
    assert code == 0 and asyncio.run(states(target.url)) == asyncio.run(states(server.url)), said


async def test_an_operator_backs_up_its_own_streams_and_cannot_reach_another_nodes_or_the_swarms(tmp_path: Path) -> None:
    """Roles and the swarm's members may ask for none of it (`test_nats_permissions`)."""
    server = SecuredServer(tmp_path, ["alpha", "beta"])
    server.start()
    try:
        config = server.config("alpha", tmp_path / "var")
        await asyncio.to_thread(server.init, "node", config)
        await asyncio.to_thread(server.init, "swarm", config)
        told = {"SWARM_NATS__NODE_CA_FILE": str(server.ca_file), "SWARM_NATS__SWARM_CA_FILE": str(server.ca_file)}
        told["SWARM_NATS__NODE_KEY_FILE"] = str(server.keys / "{node}" / "{role}.nk")
        saved = tmp_path / "saved"
        code, said = await asyncio.to_thread(swarm, "backup", "--out", str(saved), url=server.url, **told)
        assert code == 0 and QUEUE in said and "SWARM_" not in said and "BETA" not in said, said
        swarms = ("--plane", "swarm", "--key", str(server.keys / "operator" / "swarm.nk"), "--out", str(tmp_path / "swarm"))
        code, said = await asyncio.to_thread(swarm, "backup", *swarms, url=server.url, **told)
        assert code == 0 and "SWARM_ROLLOUTS" in said and "NODE_" not in said, said

        other = await opened(
            server.url,
            key_file=str(server.keys / "beta/operator.nk"),
            ca_file=str(server.ca_file),
            inbox_prefix="_INBOX_beta.operator",
        )
        client = other._connection.client
        for stream in (QUEUE, BUCKET, "SWARM_ROLLOUTS"):
            asked = json.dumps({"deliver_subject": client.new_inbox()}).encode()
            for verb, body in (("SNAPSHOT", asked), ("DELETE", b"")):
                answer = json.loads((await client.request(f"$JS.API.STREAM.{verb}.{stream}", body, timeout=5)).data)
                assert answer["error"]["description"] == "stream not found", (verb, stream, answer)
        await other.close()
        code, said = await asyncio.to_thread(swarm, "report", url=server.url, **told)
        assert code == 0 and QUEUE in said, said
    finally:
        server.kill()
