"""A node that answers and does not get on is told, in every view; one that rests is not."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shared.contracts.control import ServiceStatus, TrainerPosition
from shared.contracts.status_figures import (
    EVALUATING_BASE,
    FIRST_GROUPS,
    GENERATING,
    LATE_AT_LEAST_S,
    LATE_FACTOR,
    STARTING,
    StatusFigure,
    late_after_s,
)
from shared.roles import ROLES, Role
from shared.runtime.status import KNOWN_AFTER_S, PAUSES_KEPT, StatusBoard, WorkPace
from swarm_cli.local.control import holding_run
from swarm_cli.observe.node_state import FIRST_WORK_S, NodeState
from swarm_cli.observe.remedies import remedies, unanswered
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.observe.status import as_object, show
from swarm_cli.observe.top import screen
from swarm_cli.runs import VAR_DIR_VARIABLE

NOW = 1_000_000.0


def status(role: Role, *, age_s: float = 1.0, worked_s: float | None = 1.0, every_s: float | None = 1.0) -> ServiceStatus:
    figures = {} if worked_s is None else {str(StatusFigure.WORKED_AT): NOW - worked_s}
    if every_s is not None:
        figures[StatusFigure.WORK_EVERY_S] = every_s
    figures |= {"step_seconds": 0.5, "forward_backward_share": 0.46} if role == "trainer" else {}
    return ServiceStatus(
        node="alpha",
        role=role,
        replica="0",
        pid=1,
        host="here",
        state="training",
        started_at=NOW - 5000,
        updated_at=NOW - age_s,
        figures=figures,
    )


def view(*, finished: bool = False, at: float = NOW, **of_role: ServiceStatus) -> NodeState:
    statuses = tuple(of_role.get(role, status(role)) for role in ROLES)
    position = TrainerPosition(policy_version=900, consumed_local=0, finished=finished)
    return NodeState("alpha", statuses, position, at=at)


def drawn(*nodes: NodeState, height: int = 100, age_s: float = 0.0) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(screen(SwarmState(NOW, nodes, (), True), height=height, headline="nats://here", age_s=age_s), soft_wrap=True)
    return console.export_text()


def shown(node: NodeState) -> str:
    """Return what `swarm status` prints."""
    console = Console(width=200, file=io.StringIO(), record=True)
    show(SwarmState(NOW, (node,), (), True), console)
    return console.export_text()


def test_a_trainer_that_answers_and_has_not_stepped_for_140_s_is_bad_and_has_no_rate() -> None:
    stuck = view(trainer=status("trainer", worked_s=140.0))
    assert (stuck.health, view().health) == ("bad", "good")
    assert stuck.steps_per_minute is None and view().steps_per_minute == 120.0, "one that steps has it at the first look too"
    text = drawn(stuck)
    assert "no step for 2m (usually every 1s)" in text and "– steps/h" in text and "46%" not in text
    assert "7,200 steps/h" in drawn(view()) and "compute 46%" in drawn(view())


def test_the_rate_falls_before_a_stall_is_named() -> None:
    """For example while the disk is full: nothing says more clearly that no step is taken."""
    assert view(trainer=status("trainer", worked_s=30.0)).steps_per_minute == pytest.approx(2.0)


def test_processes_that_hold_another_reward_than_the_one_started_last_are_named_with_what_they_score() -> None:
    old, new = "a" * 64, "b" * 64
    held = {role: msgspec.structs.replace(status(role), scorer=old) for role in ROLES}
    assert view(**held).apart == "" and view().apart == "", "of a process that does not say it nothing is known"
    changed = view(**held | {"verifier": msgspec.structs.replace(status("verifier"), scorer=new, started_at=NOW - 50)})
    (told,) = [words for words in changed.notes if "reward was changed" in words]
    assert told in shown(changed) and len(told) <= 300, "the page cuts a note there"
    assert "training answers are scored by the new one and held-out answers are scored by the former one" in told
    assert "`swarm restart alpha-generator`" in told and "Restart generator, sampler, trainer" in told
    crashed = view(**held | {"generator": msgspec.structs.replace(status("generator"), scorer=new, started_at=NOW - 50)})
    assert "training answers are scored by the former one and held-out answers are scored by the new one" in crashed.apart


def test_every_display_says_the_same_of_a_stall() -> None:
    stuck = view(trainer=status("trainer", worked_s=16 * 60.0))
    words = "no step for 16m (usually every 1s)"
    assert words in shown(stuck) and words in drawn(stuck) and stuck.words == words
    assert as_object(SwarmState(NOW, (stuck,)))["nodes"]["alpha"]["trouble"] == [words]
    assert as_object(SwarmState(NOW, (view(),)))["nodes"]["alpha"]["trouble"] == []


def test_a_sampler_that_waits_for_a_silent_trainer_is_not_the_one_that_is_blamed() -> None:
    waits = status("sampler", worked_s=240.0)
    gone = view(trainer=status("trainer", age_s=240.0, worked_s=240.0), sampler=waits)
    assert gone.stall is None and view(sampler=waits).stall is not None
    assert gone.health == "bad" and gone.absent == ["no word from trainer for 4m"]
    for text in (shown(gone), drawn(gone)):
        assert "no word from trainer" in text and "trainer not answering for 4m" in text and "no batch" not in text


def test_where_three_lines_a_node_do_not_fit_one_says_it_too_and_what_is_wrong_comes_first() -> None:
    stuck = replace(view(trainer=status("trainer", worked_s=140.0)), node="zeta")
    lines = drawn(view(), stuck, height=5).splitlines()
    assert lines[1].startswith("zeta") and "no step for 2m" in lines[1] and lines[2].startswith("alpha")
    few = drawn(*(replace(view(), node=f"n{number}") for number in range(20)), stuck, height=8).splitlines()
    assert len(few) == 8 and few[1].startswith("zeta") and few[-2].startswith("16 more nodes")


def test_slow_steps_are_no_trouble_until_several_are_missing() -> None:
    assert view(trainer=status("trainer", worked_s=590.0, every_s=120.0)).stall is None
    late = view(trainer=status("trainer", worked_s=610.0, every_s=120.0)).stall
    assert late is not None and late.words == "no step for 10m (usually every 2m)"


def test_a_node_that_has_taken_all_its_steps_rests_and_is_well() -> None:
    done = view(finished=True, trainer=status("trainer", worked_s=9000.0), sampler=status("sampler", worked_s=9000.0))
    assert done.stall is None and (done.health, done.kind) == ("good", "finished")
    assert done.steps_per_minute is None, "its rate does not outlive its steps"


def test_a_first_step_is_waited_for_as_long_as_those_act_who_should_and_a_verifier_without_work_is_no_trouble() -> None:
    def young(trainer: str, generator: str, at: float = NOW) -> NodeState:
        first = status("trainer", worked_s=None, every_s=None), status("generator", worked_s=None, every_s=None)
        states = zip(first, (trainer, generator), strict=True)
        return view(at=at, **{each.role: msgspec.structs.replace(each, state=state) for each, state in states})

    assert young("loading", STARTING, NOW - 5000 + FIRST_WORK_S - 1).stall is None
    never = young("loading", STARTING).stall
    assert never is not None and never.words == "no step for 1h"
    assert young(FIRST_GROUPS, "held back").stall is not None and young("loading", EVALUATING_BASE).stall is not None
    for first in (EVALUATING_BASE, f"{EVALUATING_BASE}: 3 of 18 answers, 1,204 tokens", GENERATING):
        assert young(FIRST_GROUPS, first).stall is None, first
    assert young("training", "held back").stall is None
    assert view(verifier=status("verifier", worked_s=None, every_s=None)).stall is None


def test_a_process_that_is_late_with_its_word_is_told_before_it_counts_as_gone() -> None:
    late = view(trainer=status("trainer", age_s=14.0))
    assert late.health == "warn" and late.late == ["trainer"] and "trainer not answering for 14s" in drawn(late)
    assert view(trainer=status("trainer", age_s=40.0)).health == "bad"


def test_what_a_server_said_that_does_not_answer_any_more_has_no_rate_and_is_marked() -> None:
    old = drawn(view(), age_s=75.0)
    assert "? running when seen last" in old and "– steps/h" in old and "46%" not in old


def test_a_pace_in_bursts_is_that_of_the_bursts_and_a_past_stall_does_not_hide_the_next() -> None:
    pace, at = WorkPace(), 0.0
    for _ in range(4):
        for _ in range(16):
            pace.worked(at)
            at += 0.01
        at += 120.0
    assert pace.usual_s is not None and 100 < pace.usual_s < 130
    steady = WorkPace()
    for at in (*range(20), *range(1000, 1020)):
        steady.worked(float(at))
    assert steady.usual_s == 1.0


def test_a_pace_is_never_that_within_a_burst() -> None:
    """A verifier that scores what a batch needs in seconds, and then rests while the step is
    computed, is not late in its next rest, however many groups a burst has.
    """
    for groups in (16, 64, 400):
        pace, at = WorkPace(), 0.0
        for bursts in range(6):
            for _ in range(groups):
                pace.worked(at)
                at += 0.1
            late_s = late_after_s(pace.usual_s)
            assert late_s is None or late_s > 46.0 or bursts == 0, (groups, bursts, pace.usual_s)
            at += 46.0
    quick = WorkPace()
    for number in range(9_000):
        quick.worked(number / 10 + (540.0 if number > 7_000 else 0.0))
    assert quick.usual_s is not None and quick.usual_s < 0.2, "one stall of a process that never rests does not hide the next"


def test_what_was_waiting_when_a_process_started_says_nothing_of_its_pace() -> None:
    pace = WorkPace()
    for at in range(20):
        pace.worked(at / 100)
    assert pace.usual_s is None and late_after_s(pace.usual_s) is None
    pace.worked(KNOWN_AFTER_S + 1.0)
    pace.worked(2 * KNOWN_AFTER_S + 2.0)
    assert pace.usual_s is not None and pace.usual_s > 5.0


@given(st.lists(st.floats(0.0, 1e6), min_size=3, max_size=3 * PAUSES_KEPT))
def test_the_usual_gap_is_one_that_was_seen_and_lateness_is_several_of_it(times: list[float]) -> None:
    pace = WorkPace()
    for at in sorted(times):
        pace.worked(at)
    gaps = [b - a for a, b in zip(sorted(times), sorted(times)[1:], strict=False)]
    if max(times) - min(times) < KNOWN_AFTER_S:
        assert pace.usual_s is None
        return
    assert pace.usual_s is not None and 0.0 <= pace.usual_s <= max(gaps) * (1 + 1e-9)
    assert late_after_s(pace.usual_s) == max(LATE_AT_LEAST_S, LATE_FACTOR * pace.usual_s)


def test_a_status_says_when_its_process_worked_last_and_a_figure_can_be_taken_back() -> None:
    board = StatusBoard("alpha", "trainer", "0")
    board.worked()
    figures = board.snapshot().figures
    assert abs(figures[StatusFigure.WORKED_AT] - time.time()) < 5 and StatusFigure.WORK_EVERY_S not in figures
    board.set(StatusFigure.LOSS, 0.5)
    board.set(StatusFigure.LOSS, None)
    assert StatusFigure.LOSS not in board.snapshot().figures


def test_what_a_process_said_last_is_not_shown_beside_what_is_known_since() -> None:
    stuck = view(trainer=status("trainer", worked_s=140.0), generator=status("generator", worked_s=90.0))
    assert stuck.role_words("trainer") == "no step for 2m" and stuck.role_words("generator") == "no group for 1m"
    waits = msgspec.structs.replace(status("sampler", worked_s=140.0), state="waiting for local groups")
    assert view(sampler=waits).role_words("sampler") == "waiting for local groups, no batch for 2m"
    silent = view(verifier=status("verifier", age_s=25.0, worked_s=25.0), trainer=status("trainer", worked_s=35.0))
    assert silent.role_words("verifier") == "not answering for 25s"
    assert silent.trouble[0] == "verifier not answering for 25s", "the cause before what follows from it"
    for text in (drawn(silent), shown(silent)):
        assert "verifier not answering for 25s" in text and "no step for 35s" in text and "verifier training" not in text


def test_for_how_long_a_process_is_silent_is_told_in_full_however_long_the_other_s_state_is() -> None:
    waits = msgspec.structs.replace(status("sampler"), state="waiting for trainer (3 batches ahead)")
    for age_s in (14.0, 140.0):
        gone = view(trainer=status("trainer", age_s=age_s), sampler=waits)
        assert f"trainer not answering for {'14s' if age_s < 60 else '2m'}" in drawn(gone)
    assert gone.words == "no word from trainer for 2m"


def test_the_command_that_starts_a_silent_process_again_is_named_where_it_is_known_to_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VAR_DIR_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    run = Path("var") / "runs" / "two"
    gone = view(trainer=status("trainer", age_s=140.0), sampler=status("sampler", age_s=14.0))
    assert unanswered([gone, view()]) == ["alpha-trainer", "alpha-sampler"]
    assert unanswered([NodeState("x; rm -r /")]) == unanswered([NodeState("alpha")]) == []
    names = ["alpha-trainer", "beta-trainer"]
    again = "starts it again (with `--now` if it hangs)"
    assert remedies(names, run, 1) == [f"`swarm restart alpha-trainer` {again}; 1 more do not answer"]
    with holding_run(run), holding_run(run.parent / "one"):
        assert remedies(names, run) == [f"`swarm restart {name} --run two` {again}" for name in names]
    assert remedies(names, None) == remedies([], run) == []


def test_a_node_whose_trainer_is_starting_again_does_not_stand_still() -> None:
    waits = status("sampler", worked_s=600.0)

    def again(began_s: float, state: str) -> NodeState:
        begins = msgspec.structs.replace(status("trainer", worked_s=None, every_s=None), started_at=NOW - began_s, state=state)
        return view(trainer=begins, sampler=waits, generator=status("generator", worked_s=600.0))

    for began_s, words in ((5.0, "starting"), (300.0, "starting"), (50.0, "waiting for a batch")):
        node = again(began_s, words)
        assert node.stall is None and node.health == "good" and node.words == words, (began_s, words)
        assert "no batch" not in drawn(node)
    for began_s, words in ((70.0, "waiting for a batch"), (FIRST_WORK_S + 1, "starting")):
        assert again(began_s, words).stall is not None, (began_s, words)


def test_a_stalled_trainer_is_excused_while_another_process_of_its_node_starts() -> None:
    begins = msgspec.structs.replace(status("generator", worked_s=None, every_s=None), started_at=NOW - 5, state="starting")
    stuck = status("trainer", worked_s=140.0)
    assert view(trainer=stuck, generator=begins).stall is None and view(trainer=stuck).stall is not None


def with_roles(*roles: Role, missing: Role | None = None) -> NodeState:
    statuses = [msgspec.structs.replace(status(role, every_s=1.0), state="generating", roles=[*roles]) for role in roles]
    return NodeState("alpha", tuple(each for each in statuses if each.role != missing), None, at=NOW)


def test_a_node_without_a_trainer_is_whole_with_the_roles_that_it_has_and_misses_only_these() -> None:
    teacher, people = with_roles("generator", "verifier"), with_roles("verifier")
    for node in (teacher, people):
        assert (node.kind, node.health, node.missing, node.absent) == ("running", "good", [], [])
        assert "no trainer" in node.words and "no word" not in shown(node) + drawn(node)
    lacking = with_roles("generator", "verifier", missing="verifier")
    assert lacking.gone == ["verifier"] and lacking.health == "warn"
    assert view().needed == ROLES and view(trainer=status("trainer", age_s=500.0)).gone == ["trainer"]


def test_a_verifier_that_waits_for_people_does_not_stand_still() -> None:
    idle = msgspec.structs.replace(status("verifier", worked_s=5000.0), roles=["verifier"])
    assert NodeState("alpha", (idle,), None, at=NOW).stall is None
    alone = msgspec.structs.replace(status("generator", worked_s=5000.0), roles=["generator", "verifier"])
    stall = NodeState("alpha", (alone, with_roles("generator", "verifier").statuses[1]), None, at=NOW).stall
    assert stall is not None and stall.role == "generator"
