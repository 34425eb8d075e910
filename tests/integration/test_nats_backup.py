"""`swarm nats backup` and `swarm nats restore`, against real servers: what is put back is what was
there, nothing that exists is overwritten, and a folder that somebody changed restores nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import POLICY_KEY, VERIFIER_CONSUMER, node_bucket, node_rollouts, node_scored
from shared.transport.base import Deadline
from shared.transport.nats.jetstream_api import call
from tests.integration.nats_backups import BUCKET, LARGE, QUEUE, SCORED, opened, source, states, swarm, target
from tests.nats_server import NatsServer
from tests.secured_server import SecuredServer

__all__ = ["source", "target"]


@pytest.fixture(scope="module")
def saved(source: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of all its streams."""
    folder = tmp_path_factory.mktemp("backups") / "alpha"
    code, said = swarm("backup", "--out", str(folder), url=source.url)
    assert code == 0, said
    return folder


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


def test_a_backup_is_private_and_has_what_refers_first(saved: Path, target: NatsServer) -> None:
    manifest = json.loads((saved / "backup.json").read_bytes())
    names = [each["name"] for each in manifest["streams"]]
    assert names.index(BUCKET) < names.index(QUEUE) < names.index(SCORED) < names.index(f"{SCORED}_BLOBS")
    assert saved.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in saved.iterdir()} == {0o600}
    code, said = swarm("restore", str(saved), "--check", url=target.url)
    assert code == 0 and "nothing was changed" in said and names_on(target) == set(), said


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
    ):
        code, said = swarm("backup", *words, url=source.url)
        assert code == 1 and told in said, said
    code, said = swarm("backup", "--out", str(tmp_path / "two"), "--plane", "both", url=source.url)
    assert code == 2 and "--plane" in said, "each plane has a key of its own, so help offers one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node", "one"]


def test_a_stream_that_held_a_message_is_not_overwritten_and_an_empty_one_is_replaced(saved: Path, target: NatsServer) -> None:
    async def prepare(message: bytes) -> None:
        transport = await opened(target.url)
        await ensure_node_streams(transport, "alpha")
        if message:
            await transport.publish(node_scored("alpha"), message, stream=SCORED, message_id="mine")
        await transport.close()

    asyncio.run(prepare(b""))
    code, said = swarm("restore", str(saved), "--stream", QUEUE, url=target.url)
    assert code == 0, said
    asyncio.run(prepare(b"mine"))
    before = asyncio.run(states(target.url))
    code, said = swarm("restore", str(saved), url=target.url)
    assert code == 1 and "not overwritten" in said and SCORED in said and QUEUE in said, said
    assert asyncio.run(states(target.url)) == before


def test_a_stream_has_as_many_copies_as_it_had_or_as_are_asked_for(copied: Path, target: NatsServer) -> None:
    change(copied, QUEUE, num_replicas=3)
    code, said = swarm("restore", str(copied), "--stream", QUEUE, url=target.url)
    assert code == 1 and "replicas" in said and "go on with: swarm nats restore" in said, said
    code, said = swarm("restore", str(copied), "--replicas", "1", "--stream", QUEUE, url=target.url)
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
        lambda: change(copied, SCORED, republish={"src": ">", "dest": "swarm.rollouts.v3.alpha"}): "republish",
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
    await call(transport.connection, f"CONSUMER.DURABLE.CREATE.{SCORED}.verifier", request, Deadline(5.0), "a consumer")
    code, said = await asyncio.to_thread(swarm, "backup", "--out", str(tmp_path / "made"), "--stream", SCORED, url=source.url)
    await call(transport.connection, f"CONSUMER.DELETE.{SCORED}.verifier", None, Deadline(5.0), "a consumer")
    await transport.close()
    assert code == 0 and json.loads((tmp_path / "made" / "backup.json").read_bytes())["streams"][0]["consumers"], said
    code, said = await asyncio.to_thread(swarm, "restore", str(tmp_path / "made"), url=target.url)
    assert code == 1 and "push messages elsewhere" in said and not await states(target.url), said


def test_a_time_that_is_none_stops_no_restore(copied: Path, target: NatsServer) -> None:
    manifest = json.loads((copied / "backup.json").read_bytes())
    (copied / "backup.json").write_text(json.dumps(manifest | {"made_at": 1e300}))
    code, said = swarm("restore", str(copied), "--check", url=target.url)
    assert code == 0 and "made at a time that is none" in said, said


async def test_an_operator_backs_up_its_own_streams_and_cannot_reach_another_nodes_or_the_swarms(tmp_path: Path) -> None:
    """Roles and the swarm's members may ask for none of it (`test_permission_table`)."""
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
        client = other.connection.client
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
