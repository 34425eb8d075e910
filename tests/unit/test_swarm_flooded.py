"""A hub without accounts on which somebody makes up names by the hundred: whoever was there before
keeps its place, and has the vote.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import time
from typing import Any

import pytest
from rich.console import Console

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.streams import ensure_swarm_streams
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import OTHER_SWARM, SignatureStatus, sign_statement
from shared.transport.base import KvEntry, StoredMessage, Transport
from shared.transport.connect import connect
from shared.transport.nats.connection import Connection
from shared.transport.nats.transport import NatsTransport, connection_of
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.invite_command import members_swarm
from swarm_cli.join.findings import connection
from swarm_cli.join.hub import _look
from swarm_cli.observe import evaluation_log
from swarm_cli.observe.evaluation_log import ESTABLISHED_S, EvaluationLog, with_places
from swarm_cli.observe.node_lines import elsewhere_table
from swarm_cli.observe.snapshot import UNSIGNED_SHOWN, look_at_hub, take_snapshot
from swarm_cli.observe.status import hub_caption
from swarm_cli.observe.top import screen
from swarm_cli.target import Target
from tests.nats_server import own_plane

ALPHA, EVE = SigningKey(new_seed()), SigningKey(new_seed())


def record(node: str, key: SigningKey, at: float) -> NodeRecord:
    identity = ModelIdentity(name="m", tokenizer_hash="a" * 64)
    return NodeRecord(
        node=node, public_key=key.public_key, model=identity, tasks=["gcd"], policy_version=1, software="s", updated_at=at
    )


def report(node: str, rate: float, at: float, version: int = 1) -> EvalReport:
    return EvalReport(
        node=node, policy_version=version, created_at=at, n=8, pass_rate=rate, mean_reward=rate, per_task={}, seconds=1.0
    )


class Clocked(NatsTransport):
    """Gives the messages that a test stored the times that the hub had then."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.stored_at: dict[tuple[str, int], float] = {}

    async def read(self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0) -> list[StoredMessage]:
        return [
            dataclasses.replace(each, stored_at=self.stored_at.get((stream, each.seq), each.stored_at))
            for each in await super().read(stream, start_seq, max_messages, timeout_s)
        ]


class Hub:
    """A hub whose clock stands where a test put it, and two who write there."""

    async def open(self) -> Hub:
        self.now = time.time() - 2 * ESTABLISHED_S
        self.plane = Clocked(connection_of(await own_plane()))
        self._said = 0
        return self

    async def says(self, node: str, key: SigningKey, swarm: str, rate: float) -> None:
        self._said += 1
        payload = encode(sign_statement(report(node, rate, self.now, self._said), key, swarm))
        ack = await self.plane.publish(subjects.evals(node), payload, stream=subjects.SWARM_EVALS, message_id=str(self._said))
        self.plane.stored_at[subjects.SWARM_EVALS, ack.seq] = self.now

    async def lists(self, node: str, key: SigningKey, swarm: str) -> None:
        payload = encode(sign_statement(record(node, key, self.now), key, swarm))
        await self.plane.kv.put(subjects.SWARM_NODES_BUCKET, node, payload)

    async def alpha_is_known(self) -> None:
        """It has reported for a while."""
        await ensure_swarm_streams(self.plane)
        await self.says("alpha", ALPHA, "run-1", 0.25)
        self.now += ESTABLISHED_S + 1
        await self.says("alpha", ALPHA, "run-1", 0.5)
        await self.lists("alpha", ALPHA, "run-1")

    async def flood(self, names: int, reports: int = 1) -> None:
        for number in range(names):
            await self.lists(f"eve-{number}", EVE, "made-up")
            for _ in range(reports):
                await self.says(f"eve-{number}", EVE, "made-up", 1.0)


async def test_a_bare_address_shows_the_swarm_of_whoever_was_there_before_and_not_of_a_crowd_made_up_for_the_look() -> None:
    hub = await Hub().open()
    await hub.alpha_is_known()
    await hub.flood(5)
    seen = await look_at_hub(hub.plane, EvaluationLog())
    (alpha,) = [node for node in seen.nodes if node.scores]
    assert alpha.node == "alpha" and alpha.newest_score is not None and alpha.newest_score.pass_rate == 0.5 and alpha.signed
    assert seen.other_swarms == 5 and "5 entries are signed for other swarms" in hub_caption(seen)


async def test_of_two_swarms_as_young_as_each_other_that_which_was_heard_first_is_shown() -> None:
    hub = await Hub().open()
    await ensure_swarm_streams(hub.plane)
    hub.now = time.time()
    await hub.says("alpha", ALPHA, "run-1", 0.5)
    await hub.lists("alpha", ALPHA, "run-1")
    hub.now += 1.0
    await hub.flood(5)
    assert "alpha" in {node.node for node in (await look_at_hub(hub.plane, EvaluationLog())).nodes if node.scores}


async def test_made_up_names_push_no_known_one_out_and_compete_among_themselves() -> None:
    log = EvaluationLog(nodes_kept=4)
    start = 1_000_000.0

    def takes(node: str, key: SigningKey, at: float) -> None:
        log.take(subjects.evals(node), encode(sign_statement(report(node, 0.5, at), key, "run-1")), at)

    for at in (start, start + ESTABLISHED_S):
        takes("alpha", ALPHA, at)
    for number in range(50):
        takes(f"eve-{number}", EVE, start + ESTABLISHED_S + 1)
    assert {each.node for each in log.reports("run-1")} == {"alpha", "eve-47", "eve-48", "eve-49"}
    assert log.established() == ["alpha"]
    for number in range(50):  # who stays for as long as that gets no place of alpha's, which was there first
        for at in (start, start + 3 * ESTABLISHED_S):
            takes(f"mallory-{number}", EVE, at)
    takes("beta", SigningKey(new_seed()), start + 3 * ESTABLISHED_S)
    kept = {each.node for each in log.reports("run-1")}
    assert {"alpha", "beta"} <= kept, "and there is room for a newcomer"


async def test_unsigned_words_and_those_of_the_future_make_no_name_known() -> None:
    log = EvaluationLog()
    for at in (0.0, 2 * ESTABLISHED_S):
        log.take(subjects.evals("eve"), encode(report("eve", 1.0, 1e12)), at)
        log.take(subjects.evals("eve"), encode(sign_statement(report("eve", 1.0, 1e12), EVE, "run-1")), at)
    assert log.established() == []


async def test_more_reports_than_are_read_hide_nobody_who_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_log, "REPORTS_A_LOOK", 8)
    monkeypatch.setattr(evaluation_log, "_REPORTS_A_READ", 8)
    hub, log = await Hub().open(), EvaluationLog()
    await hub.alpha_is_known()
    await hub.flood(3, reports=10)
    await log.follow(hub.plane)
    assert [each.pass_rate for each in log.reports("run-1")] == [0.25, 0.5]
    await hub.says("alpha", ALPHA, "run-1", 0.75)
    await hub.flood(3, reports=10)
    await log.follow(hub.plane)
    assert log.reports("run-1")[-1].pass_rate == 0.75


async def test_an_entry_for_another_swarm_or_of_another_key_is_not_shown_as_signed() -> None:
    hub = await Hub().open()
    hub.now = time.time()
    await ensure_swarm_streams(hub.plane)
    await hub.says("alpha", ALPHA, "run-1", 0.5)
    await hub.lists("alpha", EVE, "run-1")
    await hub.lists("eve", EVE, "elsewhere")
    config = NodeConfig(tasks=[{"dataset": "gcd"}], nats={"swarm_id": "run-1"})
    where = connection_of(hub.plane).options.url
    log = EvaluationLog(swarm="run-1")
    seen = await take_snapshot(config, Target(where, where), ["alpha", "eve"], timeout_s=5.0, evaluations=log)
    entries = {node.node: node.entry for node in seen.nodes}
    assert {name: entry.standing for name, entry in entries.items() if entry} == dict.fromkeys(
        ("alpha", "eve"), SignatureStatus.REFUSED
    )
    assert entries["eve"] is not None and entries["eve"].problem == OTHER_SWARM
    shown = swarm_object(seen, RecentGroups())
    assert {node["entry"] for node in shown["nodes"]} == {"badly signed"}
    assert all("badly signed" in node.doubt for node in seen.nodes)
    said = io.StringIO()
    Console(file=said, width=400).print(screen(seen, height=40, headline=""))
    assert said.getvalue().count("directory entry badly signed") == 2


async def test_a_newcomer_is_told_of_the_nodes_that_signed_for_this_swarm_and_of_the_rest_apart() -> None:
    hub = await Hub().open()
    hub.now = time.time()
    await ensure_swarm_streams(hub.plane)
    await hub.lists("alpha", ALPHA, "run-1")
    await hub.lists("eve", EVE, "elsewhere")
    await hub.plane.kv.put(subjects.SWARM_NODES_BUCKET, "mallory", encode(record("mallory", EVE, hub.now)))
    await hub.plane.kv.put(subjects.SWARM_NODES_BUCKET, "garbage", b"\xff")
    look = await _look(hub.plane, "beta", "run-1")
    assert (look.nodes, look.others) == (("alpha",), 3)

    class Said:
        url, swarm_id = "nats://hub", "run-1"

    told: Any = connection(look, Said(), "beta", "", "")  # type: ignore[arg-type]
    assert told.ok and "nodes there: 1 (3 more entries in the directory, not signed for this swarm)" in told.told
    told = connection(await _look(hub.plane, "beta", "run-2"), Said(), "beta", "", "")  # type: ignore[arg-type]
    assert told.ok is None and "the directory has 4 of others" in told.told and "ask for a new token" in told.told


def test_a_table_that_is_full_leaves_out_those_whom_nobody_knows() -> None:
    assert with_places(["e1", "e2", "a", "e3", "b"], 3, lambda name: name in "ab") == ["e1", "a", "b"]
    assert with_places(["e1", "a"], 3, lambda name: name in "ab") == ["e1", "a"]


async def test_the_first_view_keeps_known_nodes_and_their_scores_against_better_ones_that_were_made_up() -> None:
    hub, log = await Hub().open(), EvaluationLog()
    await hub.alpha_is_known()
    hub.now = time.time()
    for number in range(260):
        await hub.says(f"a-{number}", EVE, "run-1", 1.0)
    config = NodeConfig(tasks=[{"dataset": "gcd"}], nats={"swarm_id": "run-1"})
    where = connection_of(hub.plane).options.url
    await log.follow(hub.plane, "run-1")
    seen = await take_snapshot(config, Target(where, where), [], timeout_s=5.0, evaluations=log, most=1000)
    rows = swarm_object(seen, RecentGroups())["leaderboard"]
    assert len(rows) == 200 and "alpha" in {row["node"] for row in rows}
    assert "alpha" in {node.node for node in (await look_at_hub(hub.plane, log, "run-1")).nodes}


async def test_an_invitation_names_the_swarm_of_whoever_was_there_before_and_says_that_there_are_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = await Hub().open()
    await hub.alpha_is_known()
    await hub.flood(5)

    url = connection_of(hub.plane).options.url

    async def connected(*_: object, **__: object) -> Transport:
        seen = Clocked(connection_of(await connect(url, name="test")))
        seen.stored_at = hub.plane.stored_at
        return seen

    monkeypatch.setattr("shared.transport.connect.connect", connected)
    assert await asyncio.to_thread(members_swarm, "nats://hub") == "run-1"
    assert "nodes of 2 swarms use nats://hub, and the token names run-1: if yours is another (made-up)" in capsys.readouterr().err


CROWD = 500


async def test_a_crowd_of_names_of_somebody_without_a_key_take_no_row_of_a_node_that_signs() -> None:
    """Messages, entries and scores under made-up names, some of them like honest ones, and unsigned
    words over the honest nodes' own.
    """
    hub = await Hub().open()
    await hub.alpha_is_known()
    hub.now = time.time()
    beta = SigningKey(new_seed())
    await hub.lists("alpha", ALPHA, "run-1")
    await hub.lists("beta", beta, "run-1")  # has just come, and has no score yet
    for number in range(CROWD):
        name = f"a1pha-{number}"
        subject = subjects.rollouts(name)
        await hub.plane.publish(subject, b"x", stream=subjects.SWARM_ROLLOUTS, message_id=name)
        if number < 50:
            await hub.plane.kv.put(subjects.SWARM_NODES_BUCKET, name, encode(record(name, EVE, hub.now)))
            said = encode(report(name, 1.0, hub.now))
            await hub.plane.publish(subjects.evals(name), said, stream=subjects.SWARM_EVALS, message_id=name)
    await hub.plane.kv.put(subjects.SWARM_NODES_BUCKET, "alpha", encode(record("alpha", EVE, hub.now)))
    for name in ("alpha", "beta"):
        said = encode(report(name, 0.0, hub.now))
        await hub.plane.publish(subjects.evals(name), said, stream=subjects.SWARM_EVALS, message_id=f"over {name}")

    seen = await look_at_hub(hub.plane, EvaluationLog())
    places = [(node.node, node.signed, node.node in seen.known) for node in seen.nodes[:2]]
    assert places == [
        ("alpha", True, True),
        ("beta", True, False),
    ]
    alpha, beta_seen = seen.nodes[:2]
    assert alpha.newest_score is not None and alpha.newest_score.pass_rate == 0.5 and alpha.entry is None
    assert beta_seen.scores == ()
    assert len(seen.nodes) == 2 + UNSIGNED_SHOWN and not any(node.signed for node in seen.nodes[2:])
    assert seen.left_out == CROWD - UNSIGNED_SHOWN
    said_to_people = io.StringIO()
    Console(file=said_to_people, width=400).print(elsewhere_table(seen.nodes, seen.known))
    rows = [line for line in said_to_people.getvalue().splitlines() if "a1pha-" in line]
    assert len(rows) == UNSIGNED_SHOWN and all("(unsigned)" in row for row in rows)
    assert "beta (new)" in said_to_people.getvalue()


async def test_the_entry_of_a_known_node_is_found_behind_more_made_up_ones_than_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_log, "ENTRIES_READ", 8)
    hub = await Hub().open()
    await hub.alpha_is_known()
    for number in range(20):
        await hub.lists(f"eve-{number}", EVE, "run-1")
    seen = await look_at_hub(hub.plane, EvaluationLog())
    assert seen.nodes[0].node == "alpha" and seen.nodes[0].entry is not None and seen.nodes[0].entry.said.model.name == "m"


async def test_known_names_behind_more_entries_than_are_read_are_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_log, "ENTRIES_READ", 8)
    hub = await Hub().open()
    await ensure_swarm_streams(hub.plane)
    names = [f"node-{number}" for number in range(2 * evaluation_log.ASKED_AT_ONCE)]
    for name in [*names, *(f"later-{number}" for number in range(20))]:
        await hub.lists(name, EVE, "run-1")
    get, all_ask = hub.plane.kv.get, asyncio.Barrier(evaluation_log.ASKED_AT_ONCE)

    async def slow(bucket: str, key: str) -> KvEntry | None:
        async with asyncio.timeout(20.0):
            await all_ask.wait()
        return await get(bucket, key)

    monkeypatch.setattr(hub.plane.kv, "get", slow)
    found = await evaluation_log.read_directory(hub.plane, names)
    assert not found.problem and set(names) <= set(found.payloads)
