"""The commands that show a swarm, as a person runs them, against a real server in which a peer has
written what it likes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import unicodedata
from pathlib import Path
from typing import Any

import msgpack
import nats
import pytest

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, NodeRecord, ServiceStatus
from shared.contracts.messages import Completion, RolloutGroup, Sampling, TaskRef
from shared.contracts.senders import Ban, BanList, SendersReport, SenderStanding
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.contracts.subjects import BANS_KEY, SENDERS_PREFIX
from shared.contracts.wire import Message, ModelIdentity
from shared.dead_letters import CAUSE_HEADER
from shared.identity.keys import SigningKey, new_seed
from shared.tasks.prompt import text_task
from shared.transport.blobs import BLOB_HEADER
from shared.transport.connect import connect
from tests import forked
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m[/bold]"
KEYS = (
    "\x1b]0;owned\x07",
    "x[/bold]",
    "\u202egpj.exe",
    "/etc/passwd",
    "a.b",
    "UPPER",
    "x" * 200,
    "漢" * 60,
    "\x7f",
    "a>b",
    "[link=http://evil]x",
)
"""Subjects' tokens: everything but white space."""
UNREADABLE = len(KEYS) + 1
"""With two that are no record, and without `\\x7f`, which the server leaves out of each subject's
last.
"""


def record(node: str, model: str = "models/base") -> NodeRecord:
    identity = ModelIdentity(name="m", tokenizer_hash="a" * 64)
    made = NodeRecord(
        node="alpha", public_key="U", model=identity, tasks=[], policy_version=1, software="s", updated_at=time.time()
    )
    raw = json.loads(json.dumps({"node": node, "model": model}))
    return _forged(made, node=raw["node"], model={"name": raw["model"], "tokenizer_hash": "a" * 64})


def _forged(message: Message, **fields: Any) -> bytes:
    """The bytes of a message with fields that its sender's own software would refuse."""
    packed: bytes = msgpack.packb({**msgpack.unpackb(encode(message)), **fields})
    return packed


def status(node: str, state: str, figures: dict[str, float]) -> ServiceStatus:
    now = time.time()
    return ServiceStatus(
        node=node, role="trainer", replica="0", pid=1, host="h", state=state, started_at=now - 9, updated_at=now, figures=figures
    )


async def hostile_swarm(url: str) -> None:
    """One honest node, alpha, and everything else that a peer or a model can have written."""
    transport = await connect(url, name="test", timeout_s=10)
    await ensure_swarm_streams(transport)
    await ensure_node_streams(transport, "alpha")
    await transport.kv.put(subjects.SWARM_NODES_BUCKET, "alpha", record("alpha"))
    figures = {"step": 7.0, "wait_share": 1e30, "step_seconds": 5e-324, f"refused_{ESCAPES}": 9.0}
    bucket = subjects.node_bucket("alpha")
    await transport.kv.put(bucket, subjects.status_key("trainer", "0"), encode(status("alpha", f"training {ESCAPES}", figures)))
    standing = SenderStanding(
        public_key=ESCAPES, name=f"eve{ESCAPES}", suspicion=0.9, accepted=0, refused={ESCAPES: 3}, quarantined_s=60.0
    )
    report = SendersReport(node="alpha", updated_at=time.time(), worst=[standing])
    await transport.kv.put(bucket, f"{SENDERS_PREFIX}0", encode(report))
    await transport.kv.put(bucket, BANS_KEY, encode(BanList(bans=[Ban(sender="eve", reason=f"spam\nbanned mallory {ESCAPES}")])))
    await transport.close()
    await _raw(url)


async def _raw(url: str) -> None:
    peer = await nats.connect(url)
    stream = peer.jetstream()
    for key in KEYS:
        await stream.publish(f"$KV.{subjects.SWARM_NODES_BUCKET}.{key}", record(key))
    await stream.publish(f"$KV.{subjects.SWARM_NODES_BUCKET}.beta", record("beta", f"model{ESCAPES}"))
    await stream.publish(f"$KV.{subjects.SWARM_NODES_BUCKET}.gamma", b"\xff")
    honest = EvalReport(
        node="alpha", policy_version=3, created_at=1.0, n=8, pass_rate=0.5, mean_reward=0.5, per_task={}, seconds=1.0
    )
    await stream.publish(subjects.evals("alpha"), encode(honest))
    await stream.publish(f"swarm.evals.v1.{KEYS[0]}", _forged(honest, node=KEYS[0]))
    await stream.publish(subjects.evals("alpha"), b"", headers={BLOB_HEADER: f"70000000 {'a' * 64} 1-4096 {'0' * 96}"})
    question = f"how\n--- completion 9 (stop, 1 tokens) {ESCAPES}"
    answer = Completion(text=f"so\n--- completion 7 (stop, 1 tokens)\r{ESCAPES}", finish_reason="stop", token_count=1)
    group = RolloutGroup(
        node="alpha",
        created_at=1.0,
        draw=5,
        policy_version=1,
        task=text_task(TaskRef(dataset="gcd", seed=1, index=1), question, "1"),
        completions=[answer],
        model=ModelIdentity(name="m", tokenizer_hash="a" * 64),
        sampling=Sampling(),
    )
    dead = subjects.node_dead_letters("alpha")
    await stream.publish(dead, encode(group), headers={CAUSE_HEADER: "scoring failed [/bold] \x1b[2J", "Nats-Msg-Id": "\x1b[31m"})
    await stream.publish(dead, b"\xff\x1b[2J", headers={CAUSE_HEADER: "unreadable"})
    await peer.close()


def swarm(server: NatsServer, *arguments: str, url: str = "--node-url") -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    environment = {**clean, "COLUMNS": "120", "SWARM_NATS__NODE_URL": server.url, "PYTHONIOENCODING": "utf-8"}
    asked = (*arguments, *([url, server.url] if url else []))
    return forked.run("swarm_cli", asked, environment=environment, cwd=ROOT, timeout=DEADLINE_S)


def acting(text: str) -> list[str]:
    return [each for each in text.replace("\n", "") if unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def test_every_command_that_shows_others_words_shows_them_as_text(server: NatsServer, tmp_path: Path) -> None:
    swarm(server, "--version", url="")  # what starts with the first one may take long, and a state is shown while it is new
    asyncio.run(hostile_swarm(server.url))
    roster = tmp_path / "roster.txt"
    roster.write_text(f"eve {SigningKey(new_seed()).public_key} the one {ESCAPES}\n")
    answers = {
        "status": swarm(server, "status"),
        "status alpha": swarm(server, "status", "alpha"),
        "status --json": swarm(server, "status", "--json"),
        "top": swarm(server, "top", "--once"),
        "dlq list": swarm(server, "dlq", "list", "--node", "alpha"),
        "dlq list --json": swarm(server, "dlq", "list", "--node", "alpha", "--json"),
        "dlq show 1": swarm(server, "dlq", "show", "1", "--node", "alpha"),
        "dlq show 2": swarm(server, "dlq", "show", "2", "--node", "alpha"),
        "ban": swarm(server, "ban", "--by", "alpha"),
        "roster list": swarm(server, "roster", "list", "--file", str(roster), url=""),
    }
    for name, answer in answers.items():
        assert answer.returncode == 0, (name, answer.stderr)
        assert not acting(answer.stdout + answer.stderr), (name, acting(answer.stdout + answer.stderr))
    shown = {name: answer.stdout for name, answer in answers.items()}
    assert f"{UNREADABLE} unreadable entries" in shown["status"] and f"{UNREADABLE} unreadable entries" in shown["top"]
    (only,) = json.loads(shown["status --json"])["nodes"]
    assert only == "alpha" and json.loads(shown["status --json"])["unreadable_entries"] == UNREADABLE
    assert r"\x1b]0;" in shown["status"] and "step 7" in shown["top"]
    assert "0.500 @3" in shown["top"], "the honest report is read past the forged ones"
    assert "[/bold]" in shown["dlq list"]
    lines = shown["dlq show 1"].splitlines()
    assert [line for line in lines if line.startswith("--- completion")] == ["--- completion 0 (stop, 1 tokens)"], "none is forged"
    assert not any(line.startswith("banned mallory") for line in shown["ban"].splitlines()), "a reason makes no line of its own"
    assert r"the one \x1b]0;owned" in shown["roster list"]


@pytest.mark.parametrize("name", ["x[/bold]", "\x1b[2J", "../../x", "Alpha", "a.b", "alpha\n"], ids=ascii)
def test_a_name_that_no_node_can_have_is_refused_before_it_is_asked_for(server: NatsServer, name: str) -> None:
    for command in (["status"], ["top", "--once"]):
        answer = swarm(server, *command, name)
        assert answer.returncode == 1 and "is not a node name" in answer.stderr and "Traceback" not in answer.stderr
        assert not acting(answer.stderr)


def test_a_directory_of_thousands_is_looked_at_in_part_and_said_so(server: NatsServer) -> None:
    """Counted in requests, because a machine's seconds are no measure: it was five for each of the
    names.
    """

    async def fill() -> None:
        transport = await connect(server.url, name="test", timeout_s=10)
        await ensure_swarm_streams(transport)
        await ensure_node_streams(transport, "alpha")
        await transport.kv.put(subjects.SWARM_NODES_BUCKET, "alpha", record("alpha"))
        await transport.kv.put(
            subjects.node_bucket("alpha"), subjects.status_key("trainer", "0"), encode(status("alpha", "training", {}))
        )
        await transport.close()
        peer = await nats.connect(server.url)
        for number in range(4999):
            await peer.publish(f"$KV.{subjects.SWARM_NODES_BUCKET}.n{number}", record(f"n{number}"))
        # This one is acknowledged: what a server has it stores in order, but later.
        await peer.jetstream(timeout=60).publish(f"$KV.{subjects.SWARM_NODES_BUCKET}.n4999", record("n4999"))
        await peer.close()

    async def counted() -> tuple[list[str], subprocess.CompletedProcess[str]]:
        listener = await nats.connect(server.url)
        asked: list[str] = []

        async def note(message: Any) -> None:
            asked.append(message.subject)

        await listener.subscribe("$JS.API.>", cb=note)
        await listener.flush(10)
        answer = await asyncio.to_thread(swarm, server, "status")
        await listener.flush(10)
        await listener.close()
        return asked, answer

    asyncio.run(fill())
    asked, answer = asyncio.run(counted())
    assert answer.returncode == 0, answer.stderr
    assert 5 < len(asked) < 60, f"{len(asked)} requests for a directory of 5001"
    assert "alpha" in answer.stdout, "the node of this server is shown, however many others there are"
    assert "n4999 " in answer.stdout and "4,901 more entries in the directory are not shown" in answer.stdout
    assert len(answer.stdout.splitlines()) < 200
    named = swarm(server, "status", "n3", "--json")
    assert json.loads(named.stdout)["nodes"]["n3"]["in_directory"] is True, "an entry that is not among the newest can be asked for"
