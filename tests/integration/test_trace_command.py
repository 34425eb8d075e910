"""`swarm trace` on the streams of a real server and real records: one group's way, in the words of
who made, took, refused and trained on it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec

from services.trainer.records import trained_line
from services.verifier.border import without_tokens
from services.verifier.refused_messages import RefusedGroup, excerpt_of
from services.verifier.sharing import sign
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import ROLLOUT_ID_HEADER, Batch, RolloutGroup, ScoredGroup, rollout_id_of
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.identity.keys import SigningKey, new_seed
from shared.run_records import TRAINED_FILE, TRAINED_MAX_BYTES, BoundedLines, refused_file
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests import forked
from tests.integration.test_rollouts_command import batch
from tests.nats_server import NatsServer
from tests.unit.sampler_groups import scored_group

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
MADE_AT = 1_700_000_000.0


def made(draw: int) -> RolloutGroup:
    """A group of alpha with tokens."""
    group = scored_group(draw, created_at=MADE_AT).group
    completions = [
        msgspec.structs.replace(each, token_ids=pack_ids([1, 2]), behaviour_logprobs=pack_logprobs([-1.0, -1.0]))
        for each in group.completions
    ]
    return msgspec.structs.replace(group, completions=completions)


async def put_scored(plane: Transport, node: str, group: RolloutGroup, origin: str, at: float) -> ScoredGroup:
    """The group in a node's stream of scored groups, as its verifier stores it."""
    scored = msgspec.structs.replace(
        scored_group(1), group_id=content_id(encode(group)), origin=origin, group=group, rewards=[0.25, 1.0], scored_at=at
    )
    headers = {ROLLOUT_ID_HEADER: rollout_id_of(scored.group_id)}
    name, stream = scored.group_id, subjects.node_scored_stream(node)
    await plane.publish(subjects.node_scored(node), encode(scored), stream=stream, message_id=name, headers=headers)
    return scored


async def put_batch(plane: Transport, node: str, of: Batch) -> None:
    stream = subjects.node_batches_stream(node)
    await plane.publish(subjects.node_batches(node), encode(of), stream=stream, message_id=f"batch-{of.number}")


async def share(plane: Transport, group: RolloutGroup, key: SigningKey) -> str:
    """As alpha shares it; the id of the bytes that cross."""
    signed = sign(group, key, share_tokens=False)
    shared_id = content_id(signed.body)
    headers = {ROLLOUT_ID_HEADER: rollout_id_of(shared_id)}
    subject, stream = subjects.rollouts("alpha"), subjects.SWARM_ROLLOUTS
    await plane.publish(subject, encode(signed), stream=stream, message_id=shared_id, headers=headers)
    return shared_id


def trained_on(var_dir: Path, node: str, step: int, group_id: str, at: float) -> None:
    answers = [{"place": 0, "advantage": -0.7, "left_out": "negative"}, {"place": 1, "advantage": 0.7, "weight": 1.0}]
    group = {"id": group_id, "origin": "foreign", "sender": "alpha", "fate": "trained", "factor": 0.5, "answers": answers}
    line = trained_line(step, at, updated=True, updates=1, groups=[group])
    BoundedLines(var_dir / "runs" / "one" / node / TRAINED_FILE, TRAINED_MAX_BYTES).append(line)


def trace(server: NatsServer, var_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SWARM_NODE__VAR_DIR": str(var_dir), "TZ": "UTC"}
    asked = ("trace", "--node-url", server.url, *arguments)
    return forked.run("swarm_cli", asked, environment=environment, cwd=ROOT, timeout=DEADLINE_S)


async def test_a_group_is_followed_from_its_maker_to_who_trains_on_it_and_who_refuses_it(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()
    try:
        plane = await connect(server.url, name="test")
        for node in ("alpha", "beta", "gamma", "delta"):
            await ensure_node_streams(plane, node)
        await ensure_swarm_streams(plane)
        group, other, key = made(1), made(2), SigningKey(new_seed())
        at_home = await put_scored(plane, "alpha", group, "local", MADE_AT + 1)
        await put_scored(plane, "alpha", other, "local", MADE_AT + 1)
        shared_id = await share(plane, group, key)
        assert shared_id != at_home.group_id, "without its tokens it has another id"
        taken = await put_scored(plane, "beta", without_tokens(group), "external", MADE_AT + 3)
        assert taken.group_id == shared_id
        await put_batch(plane, "beta", msgspec.structs.replace(batch(7, [taken], 1.5), created_at=MADE_AT + 4))
        trained_on(tmp_path, "beta", 7, shared_id, MADE_AT + 5)
        refused = RefusedGroup(
            time=MADE_AT + 3.5,
            reason="copied",
            detail="says what \x1b[2J said",
            sender="alpha",
            group_id=shared_id,
            claimed_id="",
            swarm_seq=1,
            stored_at=MADE_AT + 2,
            excerpt=excerpt_of(group),
        )
        record = refused_file(tmp_path / "runs" / "one" / "gamma", "0")
        record.parent.mkdir(parents=True)
        record.write_bytes(msgspec.json.encode(refused) + b"\n")
        await plane.close()

        by_name = [trace(server, tmp_path, name, "--json") for name in (shared_id[:12], at_home.group_id)]
        found = [json.loads(done.stdout) for done in by_name]
        assert found[0] == found[1], "it is found by either id"
        assert found[0]["ids"] == sorted([at_home.group_id, shared_id]) and found[0]["makers"] == [{"node": "alpha", "draw": 1}]
        stations = [(each["node"], each["what"]) for each in found[0]["path"] if each["what"] != "shared"]
        assert stations == [
            ("alpha", "generated"),
            ("alpha", "scored"),
            ("beta", "taken in"),
            ("gamma", "refused"),
            ("beta", "in a batch"),
            ("beta", "trainer"),
        ]
        assert [each["node"] for each in found[0]["path"] if each["what"] == "shared"] == ["alpha"]
        detail = {each["what"]: each["detail"] for each in found[0]["path"]}
        assert "step 7: drawn by learnability with 1.50" in detail["in a batch"] and detail["scored"].startswith("rewards 0.25, 1")
        assert "its loss was multiplied by 0.5; advantages #1 +0.7; left out #0 negative" in detail["trainer"]
        unknown = " ".join(found[0]["unknown"])
        assert "whether alpha trains on it" in unknown and "whether delta ever received it" in unknown
        assert "beta" not in unknown and "gamma" not in unknown

        shown = trace(server, tmp_path, shared_id[:6]).stdout
        assert "22:13:23.500  gamma  refused     copied: says what \\x1b[2J said" in shown and "\x1b" not in shown
        assert "not known:\n" in shown and "\n  whether alpha trains on it: it is in no batch that is kept" in shown
    finally:
        server.stop()


def test_what_is_no_id_what_left_no_trace_and_what_is_not_unique_is_said(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()
    try:
        odd = trace(server, tmp_path, "xyz")
        assert odd.returncode == 1 and "is not a group's id: give 6 to 64 of its digits" in odd.stderr
        gone = trace(server, tmp_path, "abcdef12", "--swarm-url", "none")
        assert gone.returncode == 1 and "no trace of a group abcdef12" in gone.stderr and "only keep the recent past" in gone.stderr
    finally:
        server.stop()


async def test_the_beginning_of_several_ids_names_none(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()
    try:
        plane = await connect(server.url, name="test")
        await ensure_node_streams(plane, "alpha")
        await plane.kv.ensure(subjects.node_bucket("alpha"))
        await plane.close()
        for step, rest in ((1, "0" * 58), (2, "1" * 58)):
            trained_on(tmp_path, "alpha", step, f"abcdef{rest}", MADE_AT)
        several = trace(server, tmp_path, "abcdef", "--swarm-url", "none")
        assert several.returncode == 1 and "several groups' ids begin with abcdef: give more digits" in several.stderr
        one = trace(server, tmp_path, "abcdef1", "--swarm-url", "none")
        assert one.returncode == 0 and "of not known" in one.stdout and "trained on in step 2" in one.stdout
    finally:
        server.stop()
