"""A run that ended longer ago than its streams keep messages is looked at as it was: with a real
NATS server's store whose messages are older than that.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.verifier.sharing_rules import sign
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.rollout_id import ROLLOUT_ID_HEADER, rollout_id_of
from shared.contracts.streams import ensure_swarm_streams, swarm_streams
from shared.identity.keys import SigningKey, new_seed
from shared.transport.connect import connect
from shared.transport.keys import bucket_stream
from swarm_cli.app import build
from swarm_cli.local.run_note import write_note
from swarm_cli.looking.kept_age import keep_whatever_its_age
from swarm_cli.looking.store_copy import server_on_copy
from swarm_cli.run_end import write_end
from swarm_cli.running import RunNote
from tests.integration.page_swarm import PageSwarm
from tests.integration.running_verifier import group
from tests.nats_server import NatsServer

KEPT_S = 10.0
LARGE = "x" * 3_000_000
"""More than a message holds: it travels in chunks, which have a stream of their own."""
DIRECTORY = bucket_stream(subjects.SWARM_NODES_BUCKET)


@dataclass(frozen=True)
class Stored:
    """A run's folder, and the groups that were shared in it."""

    folder: Path
    shared: list[str]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A run whose server ended before its messages were too old, and is not looked at before they
    all are.
    """
    var_dir = tmp_path_factory.mktemp("var")
    folder = var_dir / "runs" / "first"
    server = NatsServer(var_dir / "nats", jetstream=f'store_dir: "{folder}"\n  sync_interval: 1m').start()
    shared, first_at, last_at = asyncio.run(_write(server.url))
    server.stop()
    assert time.time() - first_at < KEPT_S, "too old before the server had ended: a machine this busy proves nothing"
    write_note(folder, RunNote(server.url, server.url, "swarm up --run first"))
    write_end(folder, 0, "progress")
    while time.time() - last_at < KEPT_S + 1:
        time.sleep(0.1)
    return Stored(folder, shared)


async def _write(url: str) -> tuple[list[str], float, float]:
    """Share two groups, one of them large, and enter the directory; returns their ids, and when the
    first and the last message was sent.
    """
    transport = await connect(url, name="test", timeout_s=10)
    for spec in swarm_streams():
        await transport.ensure_stream(replace(spec, max_age_s=KEPT_S))
    await transport.kv.ensure(subjects.SWARM_NODES_BUCKET, ttl_s=KEPT_S)
    swarm, began, shared, key = await PageSwarm.open(url), time.time(), [], SigningKey(new_seed())
    for number, answers in enumerate((None, [LARGE, "wrong"])):
        made = group("alpha", number, answers)
        group_id, payload = content_id(encode(made)), encode(sign(made, key, share_tokens=True))
        headers = {ROLLOUT_ID_HEADER: rollout_id_of(group_id)}
        stream = subjects.SWARM_ROLLOUTS
        await transport.publish(subjects.rollouts("alpha"), payload, stream=stream, message_id=group_id, headers=headers)
        shared.append(group_id)
    await swarm.node("alpha", finished=True)
    await swarm.score(swarm.report("alpha", 7, 0.5))
    await swarm.transport.close()
    await transport.close()
    return shared, began, time.time()


async def _found(url: str) -> dict[str, int]:
    transport = await connect(url, name="test", timeout_s=10)
    await ensure_swarm_streams(transport)
    streams = (subjects.SWARM_ROLLOUTS, subjects.SWARM_EVALS, DIRECTORY)
    found = {stream: (await transport.stream_state(stream)).messages for stream in streams}
    for message in await transport.read(subjects.SWARM_ROLLOUTS, 1, 10):
        found["bytes"] = found.get("bytes", 0) + len(await transport.payload(message))
    await transport.close()
    return found


def test_what_was_shared_is_there_although_it_is_older_than_its_stream_keeps_it(stored: Stored, tmp_path: Path) -> None:
    shutil.copytree(stored.folder / "jetstream", tmp_path / "store" / "jetstream")
    untouched = NatsServer(tmp_path / "store", jetstream=f'store_dir: "{tmp_path / "store"}"').start()
    assert not any(asyncio.run(_found(untouched.url)).values()), "a server drops it all, which is why the copy is changed"
    untouched.stop()

    with server_on_copy(stored.folder, stored.folder.parents[1]) as url:
        found = asyncio.run(_found(url))
    assert found[subjects.SWARM_ROLLOUTS] == 2 and found["bytes"] > len(LARGE), "the large one's chunks are there too"
    assert found[subjects.SWARM_EVALS] == found[DIRECTORY] == 1


def test_a_group_is_traced_to_its_sharing_long_after_the_run(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(stored.folder.parents[1]))
    told = CliRunner().invoke(build("trace"), ["trace", stored.shared[0], "--run", "first"])
    assert told.exit_code == 0 and "shared" in told.stdout and "message 1 of the swarm's stream" in told.stdout, told.output


def test_a_store_that_is_sealed_in_another_way_is_left_as_it_is_and_said(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "first"
    shutil.copytree(stored.folder, folder)
    (seal,) = folder.glob(f"jetstream/*/streams/{subjects.SWARM_ROLLOUTS}/meta.sum")
    seal.write_text("0" * 16)
    before = {file: file.read_bytes() for file in seal.parent.glob("meta.*")}
    assert not keep_whatever_its_age(seal.parent)
    assert {file: file.read_bytes() for file in seal.parent.glob("meta.*")} == before
    with server_on_copy(folder, tmp_path):
        pass
    assert f"the settings of {subjects.SWARM_ROLLOUTS} are in a format that is not known here" in capsys.readouterr().err


def test_an_encrypted_stream_is_left_as_it_is(tmp_path: Path) -> None:
    config = 'key: "a key of at least so many characters", cipher: aes'
    server = NatsServer(tmp_path, jetstream=f'store_dir: "{tmp_path}"\n  {config}').start()

    async def write() -> None:
        transport = await connect(server.url, name="test", timeout_s=10)
        await ensure_swarm_streams(transport)
        await transport.close()

    asyncio.run(write())
    server.stop()
    (stream,) = tmp_path.glob(f"jetstream/*/streams/{subjects.SWARM_ROLLOUTS}")
    before = {file: file.read_bytes() for file in stream.glob("meta.*")}
    assert len(before) == 3 and not keep_whatever_its_age(stream)
    assert {file: file.read_bytes() for file in stream.glob("meta.*")} == before
