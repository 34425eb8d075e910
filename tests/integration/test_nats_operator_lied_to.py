"""`swarm nats report`, `backup` and `restore` on a server that answers rubbish, or where a stranger
answers before it does: a sentence, and nothing that is made.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.transport.base import TransportError
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.nats.backup import FORMAT, Manifest, StreamEntry, file_of, write_manifest
from tests.integration.running_verifier import MakeServer
from tests.integration.test_unreadable_answers import answering

STATE = {"messages": 0, "bytes": 0, "first_seq": 0, "last_seq": 0}
OTHER = {"config": {"name": "T"}, "state": {**STATE, "consumer_count": 0}}


def listed(**entry: object) -> dict[str, object]:
    return {"total": 1, "streams": [entry]}


LIES: dict[str, dict[str, object]] = {
    "a stream without settings": listed(name="S"),
    "settings that are none": listed(name="S", config=[]),
    "a name that is none": listed(config={"name": ["S"]}, state=OTHER["state"]),
    "a state that is none": listed(config={"name": "S"}, state=[]),
    "sizes that are none": listed(config={"name": "S"}, state={"bytes": "x", "messages": "x", "last_seq": 0, "consumer_count": 0}),
    "limits that are none": {**listed(**OTHER), "limits": 3, "storage": "x"},
    "a limit without end": {**listed(**OTHER), "limits": {"max_storage": 10**4000}, "storage": 10**4000},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A backup of one empty stream."""
    (folder := tmp_path / "saved").mkdir()
    entry = StreamEntry("S", hashlib.sha256().hexdigest(), 0, {"name": "S"}, STATE)
    file_of(folder, "S").write_bytes(b"")
    write_manifest(folder, Manifest(FORMAT, 0.0, "2.15.1", "0", [entry]))
    return folder


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_an_operator_who_is_lied_to_gets_a_sentence(
    nats_server: MakeServer, tmp_path: Path, saved: Path, lie: dict[str, object]
) -> None:
    url, out = nats_server(jetstream=None).url, tmp_path / "out"
    environment = {"SWARM_NODE__ID": "alpha", "SWARM_NATS__NODE_URL": url, "SWARM_NATS__SWARM_URL": url}
    async with answering(url, json.dumps(lie).encode(), subject="$JS.API.>"):
        for words in (["report"], ["backup", "--out", str(out)], ["restore", str(saved)]):
            done = await asyncio.to_thread(CliRunner().invoke, app, ["nats", *words], env=environment)
            assert isinstance(done.exception, CommandError | TransportError), (words, repr(done.exception))
    assert not out.exists()
