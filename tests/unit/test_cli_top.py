"""What `swarm top` says of a swarm: from snapshots to the words on the screen."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from shared.contracts.control import EvalReport, PolicyPointer, ServiceStatus, TrainerPosition
from shared.roles import ROLES
from shared.transport.base import ConsumerState, StreamState
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.observe.node_lines import SPARKS, findings, nearly_full, rate, sparkline
from swarm_cli.observe.node_state import NodeState, StreamFill, duration
from swarm_cli.observe.progress import row_lines
from swarm_cli.observe.run_files import Evaluation
from swarm_cli.observe.snapshot import SwarmState, held_out_history
from swarm_cli.observe.status import as_object, show
from swarm_cli.observe.top import screen

NOW = 1_000_000.0


def status(role: str, node: str = "alpha", *, state: str = "working", age_s: float = 1.0, **figures: float) -> ServiceStatus:
    return ServiceStatus(
        node=node,
        role=role,  # type: ignore[arg-type]
        replica="0",
        pid=1,
        host="here",
        state=state,
        started_at=NOW - 420,
        updated_at=NOW - age_s,
        figures=figures,
    )


def report(version: int, pass_rate: float, *, node: str = "alpha", at: float | None = None) -> EvalReport:
    created_at = NOW + version if at is None else at
    return EvalReport(
        node=node,
        policy_version=version,
        created_at=created_at,
        n=200,
        pass_rate=pass_rate,
        mean_reward=0.5,
        per_task={},
        seconds=1.0,
    )


def fill(stream: str, messages: int, size_bytes: int = 2**20) -> StreamFill:
    consumer = ConsumerState(messages, 0, 0) if stream.endswith("ROLLOUTS") else None
    return StreamFill(stream, StreamState(1, messages, messages, size_bytes), consumer)


TRAINING = {
    "reward_local": 0.75,
    "reward_external": 0.5,
    "staleness_mean": 1.5,
    "staleness_max": 2.0,
    "step_seconds": 0.5,
    "wait_share": 0.6,
    "forward_backward_share": 0.3,
    "publish_share": 0.05,
    "checkpoint_share": 0.03,
    "optimizer_share": 0.02,
}


def node(
    name: str = "alpha", *, silent: str = "", step: int = 1200, dead: int = 0, rollouts: int = 3, **verifying: float
) -> NodeState:
    verifying = {"shared": 900, "accepted": 800, "refused": 12, "refused_flood": 9, "refused_too_old": 3, **verifying}
    verifying = {"scorers_replaced": 2, "outbox": 4, "intake_waiting": 20, **verifying}
    figures: dict[str, dict[str, float]] = {
        "generator": {"groups_generated": 1000, "policy_version": step - 1},
        "verifier": verifying,
        "sampler": {"pool_local": 5, "pool_external": 7, "wanted_local": 2, "wanted_external": 6},
        "trainer": TRAINING,
    }
    statuses = tuple(status(role, name, age_s=50.0 if role == silent else 1.0, **figures[role]) for role in ROLES)
    position = TrainerPosition(policy_version=step, consumed_local=0)
    pointer = PolicyPointer(version=step, sha256="0" * 64, size_bytes=1, uri="file:///p", consumed_local=0, created_at=NOW)
    upper = name.upper()
    streams = (fill(f"NODE_{upper}_ROLLOUTS", rollouts), fill(f"NODE_{upper}_SCORED", 10_000), fill(f"NODE_{upper}_DEAD", dead))
    scores = held_out_history(None, [report(0, 0.1), report(25, 0.4), report(50, 0.7)])
    return NodeState(name, statuses, position, pointer, at=NOW, streams=streams, scores=scores)


def shown(*nodes: NodeState, height: int = 100, notice: str = "", reachable: bool | None = True) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    swarm = SwarmState(NOW, nodes, (fill("SWARM_ROLLOUTS", 10, 2**30),), reachable)
    console.print(screen(swarm, height=height, headline="nats://here", notice=notice), soft_wrap=True)
    return console.export_text()


def test_three_lines_say_how_far_a_node_is_what_became_of_groups_and_what_its_processes_do() -> None:
    _, first, second, third, last = shown(node()).splitlines()
    assert first == "alpha  ● running  step 1,200  7,200 steps/h  version 1,200  held-out 0.700 @50 base 0.100 +0.600  ▁▅█"
    sharing = "shared 900 (outbox 4)  taken 800  refused 12: 9 flood, 3 too_old"
    assert second == f"  this start: made 1,000  {sharing}  reward 0.750  foreign 0.500  stale by 1.5 steps"
    doings = " · ".join(f"{role} working" for role in ROLES)
    assert third == f"  {doings} (wait 60%, compute 30%)"
    assert last == "shared streams  swarm_rollouts 10"


def test_a_node_alone_is_shown_without_a_word_of_sharing() -> None:
    lone = replace(node(accepted=0, refused=0, local_only_judged=1), alone=True)
    seen = SwarmState(NOW, (lone,), (fill("SWARM_ROLLOUTS", 10),), True)
    console = Console(width=200, file=io.StringIO(), record=True)
    show(seen, console)
    text = (shown(lone) + console.export_text()).lower()
    assert text.count("this start: made 1,000") == 2
    assert not [word for word in ("shared", "sharing", "taken", "refused", "swarm_", "another node") if word in text], text


def test_no_line_is_longer_than_the_terminal_and_no_more_are_shown_than_fit() -> None:
    busy = node(step=123_456, refused=1_234.0, refused_task_not_allowed=1_200.0, shared=123_000.0)
    console = Console(width=80, file=io.StringIO(), record=True)
    many = [node(f"n{number}") for number in range(12)]
    for height, nodes in ((24, [busy, node("beta")]), (24, many), (10, many)):
        console.print(screen(SwarmState(NOW, tuple(nodes), (), True), height=height, headline="nats://here"))
        lines = console.export_text().splitlines()
        assert len(lines) <= height and max(map(len, lines)) <= 80
        assert sum(line.startswith(tuple(each.node for each in nodes)) for line in lines) == min(len(nodes), height - 3 or 1)


def test_a_silent_process_is_named_with_how_long_and_its_node_has_no_rate() -> None:
    text = shown(node(silent="trainer"))
    assert "no word from trainer for 50s" in text and "trainer not answering for 50s" in text
    assert "– steps/h" in text and "! silent" in text and "sampler working" in text


def test_a_node_that_has_said_nothing_yet_is_shown_as_such() -> None:
    text = shown(NodeState("gamma", at=NOW))
    assert "gamma" in text and "held-out –" in text and text.count("never seen") == len(ROLES)


def test_of_a_node_on_another_server_nothing_is_said_that_is_not_known() -> None:
    there = NodeState("far", at=NOW, elsewhere=True)
    row = next(line for line in shown(there, node()).splitlines() if "far" in line)
    assert row.split() == ["far", "–", "–", "–", "–", "not", "listed"]


def test_the_headline_tells_of_a_server_that_is_away_above_what_was_known() -> None:
    text = shown(node(), notice="the server has not answered for 7 s").splitlines()
    assert "has not answered for 7 s" in text[1]
    assert any("alpha" in line for line in text[2:])


def test_a_swarm_plane_that_is_away_or_absent_is_told() -> None:
    assert "cannot be reached" in shown(node(), reachable=False)
    assert "train alone" in shown(node(), reachable=None)


def test_only_a_queue_that_holds_its_writer_back_is_told_when_nearly_full() -> None:
    assert [(name, ratio > 0.9) for name, ratio in nearly_full(node(rollouts=500))] == [("rollouts", True)]
    assert list(nearly_full(node())) == [], "the stream of scored groups drops its oldest"
    assert any("rollouts" in words for words in findings(node(rollouts=500)))
    assert "dead letters 3" in shown(node(dead=3)) and "dead letters" not in shown(node())


def test_held_out_history_comes_from_the_swarm_the_files_and_the_bucket() -> None:
    found = held_out_history(report(75, 0.8), [report(50, 0.7)], [Evaluation(0, 0.1, 200)])
    assert [(e.policy_version, e.pass_rate) for e in found] == [(0, 0.1), (50, 0.7), (75, 0.8)]
    state = NodeState("alpha", scores=found)
    assert state.comparison.base == Evaluation(0, 0.1, 200) and state.comparison.gain == pytest.approx(0.7)


def test_a_node_whose_base_policy_was_scored_with_another_reward_has_no_base_and_says_why() -> None:
    one, other = "a" * 64, "b" * 64
    scores = (Evaluation(0, 0.05, 20, held_out=one, scorer=one), Evaluation(20, 0.5, 20, held_out=one, scorer=other))
    state = NodeState("alpha", scores=scores)
    assert (state.comparison.base, state.comparison.gain) == (None, None)
    (said,) = [words for words in state.reward_notes if "base policy" in words]
    first = shown(replace(node(), scores=scores)).splitlines()[1]
    assert "another reward" in said and "held-out 0.500 @20" in first and "base" not in first and "+" not in first


def test_a_held_out_score_says_how_many_answers_have_no_known_reward() -> None:
    assert NodeState("alpha", scores=(Evaluation(0, 0.5, 16),)).held_out == "0.500 @0"
    assert NodeState("alpha", scores=(Evaluation(3, 0.5, 7, unknown=9),)).held_out == "0.500 @3, 7 of 16 known"


def test_an_evaluation_without_any_known_reward_is_told_by_every_display() -> None:
    """The generator writes no report of it, so the score shown is an earlier one."""
    blind = {role: status(role) for role in ROLES} | {"generator": status("generator", eval_unknown=16.0)}
    for scores, told in (((), "unknown (16)"), ((Evaluation(3, 0.5, 16),), "0.500 @3, newest unknown")):
        state = NodeState("alpha", tuple(blind.values()), at=NOW, scores=scores)
        assert (state.unscored, state.held_out) == (16, told)
        assert f"held-out {told}" in shown(state)
        assert f"held-out {told}" in row_lines(state, 1.0)[0]
        assert as_object(SwarmState(NOW, (state,)))["nodes"]["alpha"]["evaluation_without_score"] == 16
        (seen,) = swarm_object(SwarmState(NOW, (state,)), RecentGroups())["nodes"]
        assert len(seen["notes"]) == 1 and "none of its 16 answers" in seen["notes"][0]


def test_a_node_that_begins_again_begins_a_new_history() -> None:
    reports = [report(0, 0.1, at=1), report(25, 0.4, at=2), report(50, 0.6, at=3), report(0, 0.2, at=4), report(25, 0.3, at=5)]
    assert [(e.policy_version, e.pass_rate) for e in held_out_history(None, reports)] == [(0, 0.2), (25, 0.3)]


def test_the_most_frequent_refusal_is_named_over_all_replicas() -> None:
    replicas = [status("verifier", refused_flood=2, refused_banned=3), status("verifier", refused_flood=2)]
    assert NodeState("alpha", tuple(replicas), at=NOW).refusals() == "4 flood, 3 banned"
    assert NodeState("alpha", (status("verifier", refused_flood=0),), at=NOW).refusals() == ""


def test_a_sparkline_spans_its_values_keeps_the_newest_and_does_not_magnify_noise() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0.1, 0.5, 0.9], 10) == "▁▅█"
    long = sparkline([index / 100 for index in range(100)] + [0.0], 20)
    assert len(long) == 20 and long[-1] == "▁"
    assert set(sparkline([0.500, 0.505, 0.502], 10)) <= set(SPARKS[:3])


def test_rates_have_one_unit_and_ages_one_that_suits_them() -> None:
    assert (rate(120.0), rate(5.0), rate(0.5), rate(None)) == ("7,200 steps/h", "300 steps/h", "30.0 steps/h", "– steps/h")
    assert [duration(seconds) for seconds in (5, 65, 7300, 200_000)] == ["5s", "1m", "2h", "2d"]
