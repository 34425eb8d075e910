"""What the swarm's page is told: who learns from whom, who is ranked and how, and what a node does;
all of it bounded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from msgspec import structs
from prometheus_client import CollectorRegistry

from services.generator.evaluation import eval_line
from services.verifier.figures import Figures
from services.verifier.sharing import LocalModel, Reports
from services.verifier.swarm_reader import SwarmLink
from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, NodeRecord, ServiceStatus, TaskScore, TrainerPosition
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import SignatureStatus, check_statement
from shared.roles import ROLES, Role
from shared.runtime.status import StatusBoard
from shared.transport.base import StoredMessage
from shared.transport.nats.transport import NatsTransport, connection_of
from swarm_cli.dashboard import swarm_source
from swarm_cli.dashboard.page_state import (
    THIS_SERVER,
    leaderboard,
    overall,
    swarm_object,
)
from swarm_cli.dashboard.recent_groups import GROUPS_A_NODE, BatchFollower, RecentGroups, both_ends
from swarm_cli.dashboard.run_records import answers_object
from swarm_cli.dashboard.swarm_source import SwarmSource
from swarm_cli.file_names import FileNames
from swarm_cli.observe import run_files
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.run_files import Evaluation, compared, read_evaluations, read_sets, thinned
from swarm_cli.observe.snapshot import SwarmState, held_out_history
from swarm_cli.rollouts.records import HeldOutSample, Samples
from swarm_cli.target import Target
from tests.nats_server import own_plane
from tests.unit.page_batches import NOW, batch, item


def configured() -> NodeConfig:
    return NodeConfig.model_validate({"node": {"id": "alpha"}, "nats": {"swarm_id": "run-7"}, "tasks": [{"dataset": "gcd"}]})


def report(node: str, version: int, rate: float, *, at: float | None = None, held_out: str | None = "a" * 64) -> EvalReport:
    return EvalReport(
        node=node, policy_version=version, created_at=NOW + version if at is None else at, n=8, pass_rate=rate, mean_reward=rate,
        per_task={}, seconds=1.0, held_out=held_out,
    )  # fmt: skip


def test_a_batchs_groups_are_summed_up_by_step_and_the_newest_are_kept() -> None:
    recent = RecentGroups()
    recent.take("alpha", batch(1, item("alpha", "alpha", 1.0, 0.0), item("alpha", "beta", 1.0, 0.5)))
    recent.take("alpha", batch(2, item("alpha", "beta", 0.0, 0.0, dataset="sums"), item("alpha", "alpha", 1.0, replayed=True)))
    assert [(step.step, step.local, step.foreign) for step in recent.steps("alpha")] == [(1, 0.5, 0.75), (2, None, 0.0)]
    assert recent.names("beta") and not recent.names("gamma")
    newest, *_ = recent.recent(3)
    assert (newest.step, newest.place, newest.sender) == (2, 1, "alpha"), "newest first"
    for number in range(3, 3 + GROUPS_A_NODE):
        recent.take("alpha", batch(number, item("alpha", "beta", 1.0)))
    assert len(recent.recent(10_000)) == GROUPS_A_NODE and recent.recent(10, "nobody") == []


class StallingTransport(NatsTransport):
    """Stops answering after so many reads, as a server that is slow or cut off does."""

    reads_left = 2

    async def read(self, stream: str, start_seq: int, max_messages: int, timeout_s: float = 5.0) -> list[StoredMessage]:
        self.reads_left -= 1
        if self.reads_left < 0:
            await asyncio.Event().wait()
        return await super().read(stream, start_seq, max_messages, timeout_s)


async def test_a_look_that_is_cut_short_counts_no_batch_twice_and_goes_on_with_the_node_it_was_at() -> None:
    plane, follower = await own_plane(), BatchFollower()
    stalling = StallingTransport(connection_of(plane))

    async def make(taker: str, number: int) -> None:
        stream, made = subjects.node_batches_stream(taker), batch(number, item(taker, "gamma", 1.0))
        await plane.publish(subjects.node_batches(taker), encode(made), stream=stream, message_id=f"{taker}-{number}")

    for taker in ("alpha", "beta"):
        await ensure_node_streams(plane, taker)
        for number in (1, 2, 3):
            await make(taker, number)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await follower.follow(stalling, ["alpha", "beta"])
    assert follower.recent.batches == 2
    stalling.reads_left = 3
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await follower.follow(stalling, ["alpha", "beta"])
    await make("alpha", 4)
    stalling.reads_left = 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await follower.follow(stalling, ["alpha", "beta"])
    assert follower.recent.batches == 6, "beta's last one is read before alpha is asked again"
    await follower.follow(plane, ["alpha", "beta"])
    steps = {taker: [point.step for point in follower.recent.steps(taker)] for taker in ("alpha", "beta")}
    assert steps == {"alpha": [1, 2, 3, 4], "beta": [1, 2, 3]}


async def test_a_swarm_that_was_seen_is_not_lost_because_its_batches_could_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot is made up, since no server answers once and then never again at will."""

    async def seen(*_: object, **__: object) -> SwarmState:
        return SwarmState(time.time(), (node(age_s=NOW - time.time()),), (), True)

    monkeypatch.setattr(swarm_source, "take_snapshot", seen)
    monkeypatch.setattr(swarm_source, "CONNECT_S", 0.1)
    source = SwarmSource(configured(), Target("nats://127.0.0.1:9", None))
    assert await source.look() is not None
    found = source.answer("/swarm.json", {})
    assert found is not None and json.loads(found[1])["state"] not in ("waiting", "lost")


def scored(name: str, *reports: EvalReport, in_files: Sequence[Evaluation] = (), **more: Any) -> NodeState:
    """A node elsewhere with these reports."""
    return NodeState(name, at=NOW, elsewhere=True, scores=held_out_history(None, reports, in_files), **more)


def test_scores_are_ranked_by_gain_among_those_who_were_asked_the_same() -> None:
    nodes = [
        scored("alpha", report("alpha", 0, 0.1), report("alpha", 5, 0.5)),
        scored("beta", report("beta", 0, 0.1), report("beta", 5, 0.7)),
        scored("gamma", report("gamma", 5, 0.9)),
        scored("delta", report("delta", 0, 0.2, held_out="b" * 64), report("delta", 9, 1.0, held_out="b" * 64)),
        scored("eve", report("eve", 9, 1.0), signed=False),
        scored("silent"),
    ]
    rows = leaderboard(nodes)
    assert [node.node for node, _ in rows] == ["beta", "alpha", "gamma", "delta", "eve"]
    assert [found.gain and round(found.gain, 3) for _, found in rows] == [0.6, 0.4, None, 0.8, None]
    told = swarm_object(SwarmState(NOW, tuple(nodes)), RecentGroups())["leaderboard"]
    assert [(row["trusted"], row["standing"]) for row in told] == [(True, "signed")] * 4 + [(False, "unsigned")]


def row(node: NodeState, *, ended: bool = False) -> dict[str, Any]:
    (found,) = swarm_object(SwarmState(NOW, (node,)), RecentGroups(), ended=ended)["leaderboard"]
    return found


def points(told: dict[str, Any]) -> list[tuple[int, float]]:
    """The versions and scores of a row's curve."""
    return [(version, score) for version, score, *_ in told["curve"]]


def test_a_base_score_by_another_reward_or_rule_is_none() -> None:
    def of(*rated: tuple[int, float | None, str, str | None]) -> dict[str, Any]:
        said = [
            structs.replace(report("alpha", version, 0.2), pass_rate=rate, scorer=scorer * 64, pass_rule=rule)
            for version, rate, scorer, rule in rated
        ]
        return row(scored("alpha", *said))

    first = (0, 0.1, "c", "d" * 64)
    assert of(first, (4, 0.5, "c", "d" * 64))["gain"] == pytest.approx(0.4)
    other = of(first, (4, 0.5, "e", "d" * 64))
    assert (other["base"], other["gain"], other["curve"]) == (None, None, ((4, 0.5, 8, 4),))
    assert of(first, (4, 0.5, "c", "e" * 64))["base"] is None
    by_reward = of((0, 0.45, "c", "d" * 64), (4, None, "c", None))
    assert (by_reward["base"], by_reward["newest"], by_reward["by_reward"]) == (0.2, 0.2, True)


def test_a_new_training_forgets_the_last() -> None:
    again = row(scored("alpha", report("alpha", 0, 0.1), report("alpha", 5, 0.5), report("alpha", 3, 0.2, at=NOW + 100)))
    assert points(again) == [(0, 0.1), (3, 0.2)] and again["gain"] == pytest.approx(0.1)


def test_a_node_alone_is_shown_by_what_it_says_on_its_own_server(tmp_path: Path) -> None:
    said = report("alpha", 4, 0.25)
    here = NodeState("alpha", at=NOW, evaluation=said, scores=held_out_history(said, []))
    assert (found := row(here))["trusted"] and (found["standing"], found["newest"]) == (THIS_SERVER, 0.25)
    in_files = recorded(tmp_path, report("alpha", 0, 0.125))
    known = row(dataclasses.replace(here, scores=held_out_history(said, [], in_files)))
    assert (known["base"], points(known)) == (0.125, [(0, 0.125), (4, 0.25)]), "of a run of seconds no report says the first"


def recorded(folder: Path, *reports: EvalReport) -> list[Evaluation]:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(eval_line(each)) for each in reports]
    (folder / "eval.jsonl").write_text("\n".join([*lines, '{"policy_version": 0, "pass_rate": "x", "n": 8}', '{"policy_ver']))
    return read_evaluations(folder)


def test_the_curve_of_a_run_that_has_ended_is_all_that_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long run only the newest scores are kept, and the base policy's."""
    reports = [report("alpha", version, rate) for version, rate in ((0, 0.125), (4, 0.5), (6, 0.75))]
    whole = recorded(tmp_path / "whole", *reports)
    monkeypatch.setattr(run_files, "EVALUATIONS_KEPT", 2)
    shortened = recorded(tmp_path / "shortened", *reports)
    for known in (whole, shortened):
        assert known == list(map(Evaluation.of, reports))
        found = row(NodeState("alpha", at=NOW, scores=tuple(known)), ended=True)
        assert (found["newest"], found["version"], found["gain"], found["standing"]) == (0.75, 6, 0.625, "on record")
        assert points(found) == [(0, 0.125), (4, 0.5), (6, 0.75)] == compared(known).curves[""]


def test_a_score_of_a_version_far_beyond_the_steps_on_record_is_nobodys(tmp_path: Path) -> None:
    forged = [report("alpha", version, rate) for version, rate in ((0, 0.125), (4, 0.5), (10**9, 1.0))]
    assert [each.policy_version for each in recorded(tmp_path, *forged)] == [0, 4, 10**9], "without a trainer's record nobody knows"
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    assert [each.policy_version for each in recorded(tmp_path, *forged)] == [0, 4]


def test_a_result_of_a_set_that_no_generator_can_have_written_is_nobodys(tmp_path: Path) -> None:
    result = {"set": "t", "n": 8, "pass_rate": 0.25, "k": 4, "questions": 2, "error": 0.1}
    possible = [{**result, "policy_version": version, "pass_at": {"4": 0.5}} for version in (0, 4)]
    forged = [{**result, "policy_version": 10**9, "pass_at": {"4": 0.5}}, {**result, "policy_version": 4, "pass_at": {"4": 7.0}}]
    (tmp_path / "eval_sets.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*possible, *forged]))
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    (found,) = read_sets(tmp_path).values()
    assert [each.policy_version for each in found.results] == [0, 4] and found.newest.at_k == 0.5


def test_a_curve_for_each_task_is_by_the_measure_of_its_newest_result() -> None:
    def of(version: int, **by_task: tuple[float | None, float]) -> Evaluation:
        results = {name: TaskScore(n=4, pass_rate=rate, mean_reward=mean) for name, (rate, mean) in by_task.items()}
        return Evaluation(version, 0.5, 8, per_task=results)

    found = compared([of(0, gcd=(0.25, 0.3), own=(0.5, 0.1)), of(4, gcd=(0.5, 0.6), own=(None, 0.2))])
    assert found.curves == {"": [(0, 0.5), (4, 0.5)], "gcd": [(0, 0.25), (4, 0.5)], "own": [(0, 0.1), (4, 0.2)]}


def test_answers_are_compared_by_question_and_those_of_other_questions_have_no_before() -> None:
    def sample(index: int, text: str, passed: bool | None) -> HeldOutSample:
        return HeldOutSample(
            "gcd", 4, index, f"question {index}", "6", text, 3, None if passed is None else float(passed), 1, "stop", passed
        )

    base = Samples(0, NOW, [sample(1, "a", False), sample(2, "b", True)])
    newest = Samples(9, NOW, [sample(2, "c", False), sample(1, "d", True), sample(3, "e", None)])
    told = answers_object(base, newest, FileNames())
    assert told["version"] == 9 and [(row["before"], row["now"]) for row in told["rows"]] == [
        (["b", 1.0, True, {}, ""], ["c", 0.0, False, {}, ""]),
        (["a", 0.0, False, {}, ""], ["d", 1.0, True, {}, ""]),
        (None, ["e", None, None, {}, ""]),
    ]
    old, new = (structs.replace(each, scorer=scorer) for each, scorer in ((base, "1" * 64), (newest, "2" * 64)))
    told = answers_object(old, new, FileNames())
    assert told["other_reward"] and told["rows"][0]["before"] == ["b", None, None, {}, ""], "an old reward is none beside a new one"
    assert [row["now"] for row in answers_object(base, base, FileNames())["rows"]] == [None, None], "nothing was trained yet"


def test_the_number_of_steps_is_the_trainer_s_or_that_of_a_finished_node() -> None:
    running = node()
    trainer = structs.replace(running.roles("trainer")[0], figures={"max_steps": 100.0})
    others = tuple(status for status in running.statuses if status.role != "trainer")
    assert (running.max_steps, dataclasses.replace(running, statuses=(*others, trainer)).max_steps) == (0, 100)
    assert node(finished=True).max_steps == 3


def test_curves_keep_their_ends() -> None:
    curve = [(version, version / 1000) for version in range(1000)]
    assert thinned(curve, 24)[0] == curve[0] and thinned(curve, 24)[-1] == curve[-1] and len(thinned(curve, 24)) == 24


def node(
    state: str = "working", *, age_s: float = 1.0, roles: tuple[Role, ...] = ROLES, step: int = 3, finished: bool = False
) -> NodeState:
    times = {"started_at": NOW - 50, "updated_at": NOW - age_s}
    statuses = tuple(
        ServiceStatus(node="alpha", role=role, replica="0", pid=1, host="h", state=state, figures={}, **times) for role in roles
    )
    position = TrainerPosition(policy_version=step, consumed_local=step, finished=finished) if step else None
    return NodeState("alpha", statuses, position, at=NOW)


def lives(*, before: tuple[str, float], now: int, began: float = 20.0, older: int = 0) -> NodeState:
    """A node of which the first `now` roles are alive, begun `began` seconds ago (`older` of them
    long before), and the others had the state `before` so many seconds ago.
    """
    statuses = []
    for place, role in enumerate(ROLES):
        alive = place < now
        state, age_s = ("working", 1.0) if alive else before
        started_at = NOW - (5000.0 if not alive or place < older else began)
        statuses.append(
            ServiceStatus(
                node="alpha", role=role, replica="0", pid=1, host="h", state=state, figures={}, started_at=started_at,
                updated_at=NOW - age_s,
            )
        )  # fmt: skip
    return NodeState("alpha", tuple(statuses), TrainerPosition(policy_version=3, consumed_local=3), at=NOW)


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (node(), "running"),
        (node(step=0), "starting"),
        (node(step=0, roles=("generator",)), "starting"),
        (node(age_s=60.0), "silent"),
        (node(roles=("generator", "trainer")), "silent"),
        (node(finished=True), "finished"),
        (node("stopped", finished=True), "finished"),
        (node("stopped", age_s=500.0), "stopped"),
        (NodeState("alpha", at=NOW), "elsewhere"),
        (lives(before=("stopped", 90.0), now=1), "starting"),
        (lives(before=("working", 90.0), now=3), "starting"),
        (lives(before=("working", 90.0), now=1, began=20.0, older=1), "silent"),
        (lives(before=("working", 2000.0), now=3, began=900.0), "silent"),
        (lives(before=("stopped", 2.0), now=2, began=500.0), "stopped"),
        (lives(before=("stopped", 200.0), now=2, began=500.0), "silent"),
    ],
)  # fmt: skip
def test_what_a_node_does_is_told_from_its_processes(seen: NodeState, kind: str) -> None:
    assert seen.kind == kind


def test_a_node_that_is_ended_says_which_processes_still_run_and_one_started_again_which_it_waits_for() -> None:
    ending = swarm_object(SwarmState(NOW, (lives(before=("stopped", 2.0), now=1, began=500.0),), (), True), RecentGroups())
    assert ending["nodes"][0]["words"] == f"ending, still running: {ROLES[0]}" and ending["state"] == "stopped"
    again = swarm_object(SwarmState(NOW, (lives(before=("stopped", 90.0), now=2),), (), True), RecentGroups())
    assert again["nodes"][0]["words"] == f"starting: waiting for {ROLES[2]}, {ROLES[3]}" and again["state"] == "starting"


def test_one_silent_node_is_not_hidden_behind_those_that_run() -> None:
    assert overall(["running", "silent", "finished"]) == "failed"
    assert overall(["running", "finished"]) == "running"
    assert overall(["finished", "finished", "elsewhere"]) == "finished"
    assert overall(["finished", "stopped"]) == "stopped"
    assert overall([]) == "empty" and overall(["elsewhere"]) == "running"


def test_a_silent_node_says_which_process_is_silent_for_how_long_and_never_that_it_starts() -> None:
    told = swarm_object(SwarmState(NOW, (node(age_s=60.0),), (), True), RecentGroups())
    assert told["nodes"][0]["words"] == "no word from generator, verifier, sampler, trainer for 1m"


def test_a_crowd_with_a_held_out_set_of_its_own_does_not_stand_above_nodes_that_are_known() -> None:
    crowd = [scored(f"eve-{number}", report(f"eve-{number}", 1, 1.0, held_out="b" * 64)) for number in range(5)]
    rows = leaderboard([*crowd, scored("alpha", report("alpha", 1, 0.5))], known={"alpha"})
    assert rows[0][0].node == "alpha"


def test_a_request_for_what_is_no_node_or_number_is_refused_before_anything_is_asked() -> None:
    source = SwarmSource(configured(), Target("nats://127.0.0.1:9", None))
    for path, query in (
        ("/step.json", {}),
        ("/group.json", {"node": "../x", "step": "1"}),
        ("/step.json", {"node": "alpha", "step": "1e9"}),
        ("/group.json", {"node": "alpha", "step": "1", "place": "-1"}),
        ("/step.json", {"node": "alpha", "step": "9" * 40}),
    ):
        answered = source.answer(path, query)
        assert answered is not None and answered[0] == 400, (path, query)
    assert source.answer("/elsewhere", {}) is None
    unread = source.answer("/node.json", {"node": "alpha"})
    assert unread is not None and unread[0] == 503 and b"not been read yet" in unread[1]
    found = source.answer("/swarm.json", {})
    assert found is not None and json.loads(found[1])["state"] == "waiting"


async def test_the_verifier_signs_scores_and_its_directory_entry(tmp_path: Path) -> None:
    transport, log = await own_plane(), structlog.get_logger()
    await ensure_node_streams(transport, "alpha")
    await ensure_swarm_streams(transport)
    url = connection_of(transport).options.url
    config = configured().model_copy(update={"nats": configured().nats.model_copy(update={"swarm_url": url})})
    key, own = SigningKey(new_seed()), LocalModel()
    own.identity = ModelIdentity(name="m", tokenizer_hash="a" * 64)
    said = report("alpha", 4, 0.5)
    await transport.kv.put(subjects.node_bucket("alpha"), subjects.EVAL_KEY, encode(said))
    figures = Figures(CollectorRegistry(), StatusBoard("alpha", "verifier", "0"))
    link = SwarmLink(config, figures, log)
    await link.begin()
    reports = Reports(config, key, transport, link, own, log)
    loops = [asyncio.ensure_future(reports.run_evals()), asyncio.ensure_future(reports.run_record())]
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            messages = await transport.read(subjects.SWARM_EVALS, 1, 1)
            entry = await transport.kv.get(subjects.SWARM_NODES_BUCKET, "alpha")
            if messages and entry:
                break
            await asyncio.sleep(0.01)
    finally:
        await cancel_and_wait(*loops)
    assert messages and messages[0].inline is not None and entry is not None
    score = check_statement(messages[0].inline, EvalReport, time.time() + 1e6, "run-7")
    assert (score.said, score.standing, score.public_key) == (said, SignatureStatus.SIGNED, key.public_key)
    assert check_statement(entry.value, NodeRecord, time.time(), "run-7").standing is SignatureStatus.SIGNED


def test_a_card_shows_the_end_of_a_long_question_where_tasks_of_one_dataset_differ() -> None:
    asked = (
        "Rotate a square matrix.\n\n"
        + "Your output should be a matrix in the same format. " * 4
        + "\n\nRotate the matrix below:\n6 2\n0 7\n"
    )
    told = both_ends(asked)
    assert told.startswith("Rotate a square matrix.") and " … " in told and told.endswith("Rotate the matrix below:\n6 2\n0 7")
    assert len(told) <= 120 and all(word in asked.split() for word in told.split() if word != "…"), told
    assert both_ends("What is 2 + 3?") == "What is 2 + 3?"
    assert both_ends("x" * 10_000 + " " * 10_000).startswith("x")
