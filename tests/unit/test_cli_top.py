"""What `swarm top` says of a swarm: from snapshots to the words on the screen."""

from __future__ import annotations

import io

from rich.console import Console

from shared.contracts.control import EvalReport, PolicyPointer, ServiceStatus, TrainerPosition
from shared.transport.base import ConsumerState, StreamState
from swarm_cli.local.procfile import ROLES
from swarm_cli.observe.node_state import NodeView, duration, top_refusal
from swarm_cli.observe.run_files import Evaluation
from swarm_cli.observe.snapshot import NodeSnapshot, StreamFill, SwarmSnapshot
from swarm_cli.observe.top_model import HeldOut, TopHistory, TopModel, held_out_history
from swarm_cli.observe.top_view import SPARKS, _held_out, rate, screen, sparkline

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
) -> NodeSnapshot:
    verifying = {"shared": 900, "accepted": 800, "refused": 12, "refused_flood": 9, "refused_too_old": 3, **verifying}
    verifying = {"scorers_replaced": 2, "outbox": 4, "intake_backlog": 10, "intake_waiting": 20, **verifying}
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
    return NodeSnapshot(NodeView(name, statuses, position, pointer), streams, True)


def model(*nodes: NodeSnapshot, reachable: bool | None = True) -> TopModel:
    snapshot = SwarmSnapshot(NOW, nodes, (fill("SWARM_ROLLOUTS", 10, 2**30),), reachable)
    reports = [report(0, 0.1), report(25, 0.4), report(50, 0.7)]
    return TopHistory().model(snapshot, reports, {})


def shown(shows: TopModel, *, width: int = 80, height: int | None = None, notice: str = "") -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(screen(shows, width=width, height=height, headline="nats://here", notice=notice))
    return console.export_text()


def test_a_panel_says_how_far_a_node_is_what_it_learned_and_what_waits() -> None:
    text = shown(model(node()))
    for words in (
        "alpha  step 1,200  2.00 steps/s  policy 1,200 (sampling with 1,199)",
        "0.700 @50 of 200  base 0.100 +0.600  ▁▅█",
        "local 0.750  foreign 0.500  stale 1.5 (max 2)  scorer kills 2",
        "made 1,000  to score 3  shared 900  outbox 4  pool 5+7",
        "a batch: 2 local + 6 foreign groups",
        "waiting 30  taken in 800  refused 12: flood",
        "wait 60% compute 30% publish 5% checkpoint 3%",
        "generator working, up 7m",
        "scored 50%",
        "dead letters 0",
        "shared streams  rollouts 50%",
    ):
        assert words in text, f"{words!r} is missing from\n{text}"


def test_no_line_is_cut_short_or_longer_than_the_terminal() -> None:
    busy = node(step=123_456, refused=1_234.0, refused_task_not_allowed=1_200.0, intake_backlog=5_280.0, shared=123_000.0)
    for width in (80, 160):
        text = shown(model(busy, node("beta")), width=width)
        assert "…" not in text, text
        assert max(map(len, text.splitlines())) <= width


def test_panels_stand_in_pairs_where_there_is_room() -> None:
    def line_of(text: str, name: str) -> int:
        return next(number for number, line in enumerate(text.splitlines()) if f" {name}  step" in line)

    both = model(node(), node("beta"))
    assert line_of(shown(both, width=160), "alpha") == line_of(shown(both, width=160), "beta")
    assert line_of(shown(both, width=80), "alpha") < line_of(shown(both, width=80), "beta")


def test_two_nodes_fit_a_small_terminal_and_many_become_rows() -> None:
    assert len(shown(model(node(), node("beta")), height=24).splitlines()) <= 24
    many = model(*(node(f"n{number}") for number in range(12)))
    for width in (80, 160):
        text = shown(many, width=width, height=24)
        assert len(text.splitlines()) <= 24
        assert all(f"n{number} " in text for number in range(12))
        assert "…" not in text


def test_a_silent_process_is_named_with_how_long_and_its_node_has_no_rate() -> None:
    text = shown(model(node(silent="trainer")))
    assert "trainer not answering for 50s" in text
    assert "– steps/s" in text
    assert "sampler working, up 7m" in text


def test_a_node_that_has_said_nothing_yet_is_shown_as_such() -> None:
    unheard = NodeSnapshot(NodeView("gamma"), (), True)
    text = shown(model(unheard))
    assert "gamma" in text and "not evaluated yet" in text and "no process has reported yet" in text


def test_of_a_node_on_another_server_nothing_is_said_that_is_not_known() -> None:
    there = NodeSnapshot(NodeView("far"), (), True, elsewhere=True)
    for width in (80, 160):
        panel = shown(model(there), width=width)
        for words in ("far  step –  – steps/s  policy –", "made –", "shared –", "taken in –  refused –", "on another server"):
            assert words in panel, f"{words!r} is missing from\n{panel}"
    row = next(line for line in shown(model(there, node()), width=160, height=6).splitlines() if line.startswith("far"))
    assert row.split() == ["far", *["–"] * 13, "elsewhere"] and "no generator" not in panel


def test_the_headline_tells_of_a_server_that_is_away_above_what_was_known() -> None:
    text = shown(model(node()), notice="the server has not answered for 7 s").splitlines()
    assert "has not answered for 7 s" in text[1]
    assert any("alpha" in line for line in text[2:])


def test_a_swarm_plane_that_is_away_or_absent_is_told() -> None:
    assert "cannot be reached" in shown(model(node(), reachable=False))
    assert "train alone" in shown(model(node(), reachable=None))


def test_only_a_queue_that_holds_its_writer_back_is_marked_when_nearly_full() -> None:
    full = model(node(rollouts=500)).nodes[0].fills
    assert [(fill.name, fill.full_is_normal) for fill in full] == [("rollouts", False), ("scored", True), ("dead", True)]
    assert full[0].ratio is not None and full[0].ratio > 0.9


def test_held_out_history_comes_from_the_swarm_the_files_and_the_bucket() -> None:
    view = NodeView("alpha", evaluation=report(75, 0.8))
    found = held_out_history(view, [report(50, 0.7), report(25, 0.4, node="beta")], [Evaluation(0, 0.1, 200)])
    assert [(e.policy_version, e.pass_rate) for e in found.history] == [(0, 0.1), (50, 0.7), (75, 0.8)]
    assert found.base == Evaluation(0, 0.1, 200)


def test_a_held_out_score_says_how_many_answers_have_no_known_reward() -> None:
    assert _held_out(HeldOut((Evaluation(0, 0.5, 16),))).plain.startswith("0.500 @0 of 16  ")
    assert _held_out(HeldOut((Evaluation(3, 0.5, 7, unknown=9),))).plain.startswith("0.500 @3 of 7 (9 unknown)")


def test_a_node_that_begins_again_begins_a_new_history() -> None:
    reports = [report(0, 0.1, at=1), report(25, 0.4, at=2), report(50, 0.6, at=3), report(0, 0.2, at=4), report(25, 0.3, at=5)]
    found = held_out_history(NodeView("alpha"), reports, ())
    assert [(e.policy_version, e.pass_rate) for e in found.history] == [(0, 0.2), (25, 0.3)]


def test_the_most_frequent_refusal_is_named_over_all_replicas() -> None:
    assert top_refusal([status("verifier", refused_flood=2, refused_banned=3), status("verifier", refused_flood=2)]) == ("flood", 4)
    assert top_refusal([status("verifier", refused_flood=0)]) is None


def test_a_sparkline_spans_its_values_keeps_the_newest_and_does_not_magnify_noise() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0.1, 0.5, 0.9], 10) == "▁▅█"
    long = sparkline([index / 100 for index in range(100)] + [0.0], 20)
    assert len(long) == 20 and long[-1] == "▁"
    assert set(sparkline([0.500, 0.505, 0.502], 10)) <= set(SPARKS[:3])


def test_rates_and_ages_have_a_unit_that_suits_them() -> None:
    assert (rate(120.0), rate(5.0), rate(0.5), rate(None)) == ("2.00 steps/s", "5.0 steps/min", "30.0 steps/h", "– steps/s")
    assert [duration(seconds) for seconds in (5, 65, 7300, 200_000)] == ["5s", "1m", "2h", "2d"]
