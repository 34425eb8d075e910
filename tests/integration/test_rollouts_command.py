"""`swarm rollouts` as a person runs it, on the batch log of a real server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from services.trainer.records import trained_line
from services.verifier.refused_messages import excerpt_of
from shared.config.task_sections import TaskSpec
from shared.contracts.codec import content_id, encode
from shared.contracts.messages import ROLLOUT_ID_HEADER, Batch, BatchItem, Completion, ScoredGroup, TaskRef, rollout_id_of
from shared.contracts.sampler_state import SamplerState
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_batches, node_batches_stream, node_bucket, node_scored, node_scored_stream
from shared.run_records import RefusedGroup, refused_file
from shared.tasks.derive import derive_task
from shared.tasks.file_source import with_row_name
from shared.tasks.prompt import text_task
from shared.transport.connect import connect
from tests import forked
from tests.nats_server import NatsServer
from tests.unit.sampler_groups import scored_group

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e"


def said(scored: ScoredGroup, *texts: str, dataset: str = "chain_sum") -> ScoredGroup:
    """The group with these completions, in this dataset."""
    ref = msgspec.structs.replace(scored.group.task.ref, dataset=dataset)
    task = msgspec.structs.replace(scored.group.task, ref=ref)
    completions = [Completion(text=text, finish_reason="stop", token_count=3) for text in texts]
    return msgspec.structs.replace(scored, group=msgspec.structs.replace(scored.group, task=task, completions=completions))


def batch(number: int, groups: Sequence[ScoredGroup], weight: float | None = None) -> Batch:
    items = [
        BatchItem(
            scored=each,
            staleness=1 if each.origin == "local" else None,
            age_s=4.0,
            weight=None if each.origin == "local" else weight,
        )
        for each in groups
    ]
    return Batch(
        number=number,
        created_at=1000.0,
        items=items,
        strategy="learnability",
        seed=number,
        wanted_local=1,
        wanted_external=1,
        pool_local=1,
        pool_external=1,
        shortage="none",
        state=SamplerState(),
    )


def mixed(number: int, text: str = "three") -> Batch:
    return batch(
        number,
        [
            said(scored_group(number), "one", "two"),
            said(scored_group(number, node="beta", origin="external"), text, "four", dataset="gcd"),
        ],
        weight=1.5,
    )


async def written(url: str, batches: Sequence[Batch], purged_to: int = 0) -> None:
    plane = await connect(url, name="test")
    await ensure_node_streams(plane, "alpha")
    for each in batches:
        await plane.publish(
            node_batches("alpha"), encode(each), stream=node_batches_stream("alpha"), message_id=f"batch-{each.number}"
        )
    if purged_to:
        await plane.purge(node_batches_stream("alpha"), purged_to)
    await plane.close()


def command(server: NatsServer, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "swarm_cli", "rollouts", "alpha", "--node-url", server.url, *arguments]


def swarm(server: NatsServer, *arguments: str, columns: int = 200, var_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns), "SWARM_NODE__VAR_DIR": str(var_dir or "nowhere")}
    asked = ("rollouts", "alpha", "--node-url", server.url, *arguments)
    return forked.run("swarm_cli", asked, environment=environment, cwd=ROOT, timeout=DEADLINE_S)


def objects(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_a_person_reads_question_completions_rewards_and_where_a_group_comes_from(server: NatsServer) -> None:
    await written(server.url, [mixed(1), mixed(2, text=ESCAPES + "x" * 50)])
    shown = swarm(server, "--limit", "2", "--characters", "40")
    assert shown.returncode == 0, shown.stderr
    for words in (
        "step 2 · local",
        "foreign, from beta",
        "gcd seed 2 index 0",
        "drawn by learnability with 1.50 of the mean weight",
    ):
        assert words in " ".join(shown.stdout.split())
    for words in ("question:  1+1", "reference: 2", "staleness 1", "the next group of this node", "two", "four", "more characters"):
        assert words in shown.stdout
    assert "step 1" not in shown.stdout
    assert not set("\x1b\x07\u202e") & set(shown.stdout), "others' words must not act on a terminal"
    assert "not on record here" in shown.stdout
    narrow = swarm(server, "--limit", "1", columns=60).stdout
    assert "reward: " in narrow and "reward: " in shown.stdout, "one below the other at any width"


async def test_stored_answers_are_scored_again_by_the_rewards_as_they_are_now(server: NatsServer, tmp_path: Path) -> None:
    """Also where the changed reward gets another column, and so the rows have another name."""
    rows = [{"question": f"{number}+1", "answer": number + 1, "level": number} for number in range(8)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "node.toml").write_text(
        '[[tasks]]\npath = "q.jsonl"\nreward = "r.py:mine"\n'.replace("q.jsonl", f"{tmp_path}/q.jsonl")
    )
    (tmp_path / "r.py").write_text("def mine(completions, answer):\n    return [float(text == '4') for text in completions]\n")
    spec = with_row_name(TaskSpec(path=f"{tmp_path}/q.jsonl", reward=f"{tmp_path}/r.py:mine"))
    ref = TaskRef(dataset=spec.dataset, seed=1, index=3)
    groups = []
    for draw, task in enumerate((derive_task(ref), text_task(ref, "another question", "2"))):
        scored = scored_group(draw, rewards=(1.0, 0.0, 0.0))
        completions = [Completion(text=text, finish_reason="stop", token_count=3) for text in ("4", "5", "?")]
        group = msgspec.structs.replace(scored.group, task=task, completions=completions)
        groups.append(msgspec.structs.replace(scored, group=group))
    foreign = said(scored_group(9, node="beta", origin="external"), "one", "two", dataset="gcd")
    await written(server.url, [batch(1, [*groups, foreign])])
    rows[3]["answer"] = 44
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text(
        "def mine(completions, answer, level):\n"
        "    return [int(text) / 4 + each if text.isdigit() else None for text, each in zip(completions, level)]\n"
    )
    asked = ("--config", f"{tmp_path}/node.toml", "--score-again")
    shown = swarm(server, *asked, "--json")
    first, second = objects(shown)
    assert first["again"]["rewards"] == [4.0, 4.25, None]
    assert first["again"]["unknown"] == ["", "", "not_applicable"]
    assert (first["reference"], first["again"]["reference"]) == ("4", "44"), "the row has another answer now"
    assert [each["reward"] for each in first["completions"]] == [1.0, 0.0, 0.0], "what was stored stays"
    assert second["again"]["rewards"] == [] and "another question" in second["again"]["problem"]
    words = swarm(server, *asked)
    assert words.returncode == 0, words.stderr
    for told in (shown.stderr, words.stderr):
        assert "mean reward of 2 answers: 0.5 before, 4.12 now; 2 changed (2 higher, 0 lower)" in told
    assert "4.25" in words.stdout and "unknown (not_applicable)" in words.stdout
    (tmp_path / "r.py").write_text("def mine(completions, answr):\n    return []\n")
    wrong = swarm(server, *asked)
    assert wrong.returncode != 0 and "answr" in wrong.stderr
    assert swarm(server, *asked, "--foreign").returncode != 0


async def test_each_of_several_rewards_is_shown_by_name(server: NatsServer) -> None:
    parts = {"r.py:right": [1.0, 0.0], "r.py:tone": [None, 0.25]}
    await written(server.url, [batch(1, [msgspec.structs.replace(said(scored_group(1), "one", "two"), parts=parts)])])
    (found,) = objects(swarm(server, "--json"))
    assert [each["parts"] for each in found["completions"]] == [
        {"r.py:right": 1.0, "r.py:tone": None},
        {"r.py:right": 0.0, "r.py:tone": 0.25},
    ]
    shown = swarm(server).stdout
    assert "r.py:right: 1" in shown and "r.py:tone: 0.25" in shown and "r.py:tone: does not apply" in shown


async def test_groups_are_chosen_by_step_origin_sender_dataset_and_marks(server: NatsServer) -> None:
    await written(server.url, [mixed(number) for number in range(1, 8)], purged_to=2)
    at_step = objects(swarm(server, "--step", "4", "--json"))
    assert objects(swarm(server, "--step", "4", "--limit", "1", "--json")) == at_step[1:]
    assert [(each["step"], each["origin"], each["sender"]) for each in at_step] == [(4, "local", "alpha"), (4, "foreign", "beta")]
    assert at_step[1]["draw_weight"] == 1.5 and at_step[0]["staleness"] == 1
    foreign = objects(swarm(server, "--foreign", "--limit", "3", "--json"))
    assert [(each["step"], each["sender"]) for each in foreign] == [(5, "beta"), (6, "beta"), (7, "beta")]
    assert {each["dataset"] for each in objects(swarm(server, "--dataset", "gcd", "--json"))} == {"gcd"}
    assert {each["sender"] for each in objects(swarm(server, "--from", "beta", "--local", "--json"))} == set()
    for option, text, reward in (("--right", "two", 1.0), ("--wrong", "one", 0.0)):
        (found,) = objects(swarm(server, "--local", option, "--limit", "1", "--json"))
        assert [(each["text"], each["reward"]) for each in found["completions"]] == [(text, reward)]  # type: ignore[attr-defined]


async def test_only_groups_that_a_step_trained_on_are_shown_where_that_is_asked(server: NatsServer, tmp_path: Path) -> None:
    batches = [mixed(number) for number in range(1, 6)]
    await written(server.url, batches)
    refused = swarm(server, "--trained", var_dir=tmp_path)
    assert refused.returncode == 1 and "--trained needs the trainer's records" in refused.stderr
    folder = tmp_path / "runs" / "one" / "alpha"
    folder.mkdir(parents=True)
    tokens = {"token_ratio": [1.0, 0.97, None], "token_weight": [1.0, 0.97, 1.0]}
    used = {"place": 0, "advantage": 1.5, "tokens": 3, "kept": 3, **tokens}
    for batch_made in batches[:4]:
        local, foreign = (item.scored.group_id for item in batch_made.items)
        groups = [
            {"id": local, "origin": "local", "sender": "alpha", "fate": "trained", "answers": [used]},
            {"id": foreign, "origin": "external", "sender": "beta", "fate": "absurd", "answers": []},
        ]
        with (folder / "trained.jsonl").open("a") as file:
            file.write(trained_line(batch_made.number, 2.0, updated=True, updates=1, groups=groups) + "\n")
    newest = swarm(server, "--limit", "1", var_dir=tmp_path)
    assert "not trained on yet" in newest.stdout and "--trained" in newest.stderr
    trained = objects(swarm(server, "--limit", "2", "--trained", "--json", var_dir=tmp_path))
    assert [(each["step"], each["origin"]) for each in trained] == [(3, "local"), (4, "local")]
    told, untold = (completion["training"] for completion in trained[-1]["completions"])
    assert {name: told[name] for name in tokens} == tokens and untold is None


async def test_what_is_not_there_is_said_with_what_is(server: NatsServer) -> None:
    nothing = swarm(server)
    assert nothing.returncode == 1 and "this server has no batch log of alpha" in nothing.stderr
    await written(server.url, [mixed(number) for number in range(1, 6)], purged_to=2)
    for step in ("2", "9"):
        gone = swarm(server, "--step", step)
        assert gone.returncode == 1 and "it holds steps 3 to 5" in gone.stderr
    none = swarm(server, "--dataset", "gcd", "--local")
    assert none.returncode == 0 and none.stdout == "" and "no group in the batches of alpha matches" in none.stderr
    unseen = swarm(server, "--dataset", "gdc", "--json")
    assert unseen.returncode == 1 and unseen.stdout == ""
    assert "they have chain_sum, gcd; did you mean gcd?" in " ".join(unseen.stderr.split())
    both = swarm(server, "--right", "--wrong")
    assert both.returncode == 1 and "together match nothing" in both.stderr


def test_the_batches_to_come_are_followed_once_each(server: NatsServer) -> None:
    asyncio.run(written(server.url, [mixed(1)]))
    follower = subprocess.Popen(
        command(server, "--follow", "--json", "--limit", "1"), stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
    )
    give_up = threading.Timer(DEADLINE_S, follower.kill)
    give_up.start()
    try:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["step"] == 1
        asyncio.run(written(server.url, [mixed(2), mixed(3)]))
        seen = [json.loads(follower.stdout.readline()) for _ in range(4)]
        assert [(each["step"], each["origin"]) for each in seen] == [(2, "local"), (2, "foreign"), (3, "local"), (3, "foreign")]
    finally:
        follower.terminate()
        follower.wait(timeout=DEADLINE_S)
        give_up.cancel()


async def test_the_path_of_a_group_is_told_of_every_node_that_had_it(server: NatsServer, tmp_path: Path) -> None:
    group = scored_group(1).group
    name = content_id(encode(group))

    def scored(origin: Literal["local", "external"], at: float) -> ScoredGroup:
        made = scored_group(1, origin=origin)
        return msgspec.structs.replace(made, group_id=name, group=group, rewards=[0.25, 1.0], scored_at=at)

    plane = await connect(server.url, name="test")
    for node, origin, at in (("alpha", "local", 1001.0), ("beta", "external", 1003.0)):
        await ensure_node_streams(plane, node)
        await plane.kv.ensure(node_bucket(node))
        for each in (scored(origin, at), scored_group(2, origin=origin)):
            await plane.publish(
                node_scored(node),
                encode(each),
                stream=node_scored_stream(node),
                message_id=each.group_id,
                headers={ROLLOUT_ID_HEADER: rollout_id_of(each.group_id)},
            )
    of = msgspec.structs.replace(batch(7, [scored("external", 1003.0)], 1.5), created_at=1004.0)
    await plane.publish(node_batches("beta"), encode(of), stream=node_batches_stream("beta"), message_id="batch-7")
    await plane.kv.ensure(node_bucket("gamma"))
    await plane.close()
    refused = RefusedGroup(
        time=1003.5, reason="copied", detail=f"says what {ESCAPES} said", sender="alpha", id=name, claimed_id="",
        swarm_seq=1, stored_at=1002.0, group=excerpt_of(group),
    )  # fmt: skip
    record = refused_file(tmp_path / "runs" / "one" / "gamma", "0")
    record.parent.mkdir(parents=True)
    (tmp_path / "runs" / "one" / "alpha").mkdir()
    record.write_bytes(msgspec.json.encode(refused) + b"\n")

    done = swarm(server, "--group", name[:8], "--run", "one", var_dir=tmp_path)
    lines = [line.split("  ", 1)[1] for line in done.stdout.splitlines()]
    assert lines[:2] == ["alpha  scored: rewards 0.25, 1", "beta  taken in, from alpha: rewards 0.25, 1"], done.stderr
    assert lines[2].startswith("gamma  refused: copied: says what") and lines[3].startswith("beta  in the batch of step 7: ")
    assert len(lines) == 4 and "\x1b" not in done.stdout
