"""What the progress view shows, and when it calls a run complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from shared.config import load_config
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, LeaseRecord, PolicyPointer, ServiceStatus, TrainerPosition
from shared.contracts.status_figures import EVALUATING_BASE, EVALUATING_LAST, FIRST_GROUPS, LOADING_POLICY, STARTING, STOPPED
from shared.roles import ROLES
from shared.transport.base import KvEntry
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.observe.node_lines import findings, left_s, node_lines
from swarm_cli.observe.node_state import NodeState, duration
from swarm_cli.observe.progress import ProgressView, evaluations_done, row_lines, steps_done
from swarm_cli.observe.remedies import unanswered
from swarm_cli.observe.run_files import Evaluation
from swarm_cli.observe.snapshot import SwarmState, held_out_history, node_state
from swarm_cli.observe.status import as_object
from swarm_cli.observe.step_rate import StepRate, StepRates
from swarm_cli.runs import RunEnd

NOW = 1_000_000.0


def status(role: str, *, replica: str = "r1", age_s: float = 1.0, state: str = "working", **figures: float) -> ServiceStatus:
    return ServiceStatus(
        node="alpha",
        role=role,  # type: ignore[arg-type]
        replica=replica,
        pid=1,
        host="here",
        state=state,
        started_at=NOW - 100,
        updated_at=NOW - age_s,
        figures=figures,
    )


def position(step: int) -> TrainerPosition:
    return TrainerPosition(policy_version=step, consumed_local=0)


def pointer(version: int) -> PolicyPointer:
    return PolicyPointer(version=version, sha256="0" * 64, size_bytes=1, uri="file:///p", consumed_local=0, created_at=NOW)


def report(version: int, pass_rate: float = 0.5) -> EvalReport:
    return EvalReport(
        node="alpha", policy_version=version, created_at=NOW, n=200, pass_rate=pass_rate, mean_reward=0.5, per_task={}, seconds=1.0
    )


def view(
    step: int, *, evaluated: int | None = None, statuses: tuple[ServiceStatus, ...] = (), rate: float | None = None
) -> NodeState:
    known = None if evaluated is None else report(evaluated)
    scores = held_out_history(known, [], [Evaluation(0, 0.1, 200)] if known else [])
    return NodeState("alpha", statuses, position(step), pointer(step), known, at=NOW, scores=scores, seen_rate=rate)


def entry(key: str, value: bytes) -> KvEntry:
    return KvEntry(key=key, value=value, revision=1)


def test_a_bucket_becomes_a_view_and_what_cannot_be_read_is_named() -> None:
    seen = node_state(
        "alpha",
        [
            entry("status.trainer.r1", encode(status("trainer", step=7.0))),
            entry("trainer", encode(position(6))),
            entry("policy", encode(pointer(6))),
            entry("eval", encode(report(5))),
            entry("ledger", b"somebody else's"),
            entry("status.sampler.r1", b"\xc1 torn"),
        ],
    )
    assert (seen.step, seen.version) == (7, 6)
    assert seen.evaluation is not None and seen.evaluation.policy_version == 5
    assert seen.unreadable == ("status.sampler.r1",)


def read(node: str, entries: list[KvEntry]) -> NodeState:
    return replace(node_state(node, entries), at=NOW, claimed=True)


def lease(role: str, host: str, *, run: str = "one", released: bool = False, stored_at: float = NOW - 1) -> KvEntry:
    record = LeaseRecord(holder="1", run=run, host=host, pid=7, taken_at=NOW, lease_s=30.0, released=released)
    return KvEntry(f"lease.{role}", encode(record), 1, stored_at=stored_at)


def test_the_machine_that_holds_a_node_s_name_is_known_unless_it_is_this_one() -> None:
    left, dead = lease("sampler", "left", released=True), lease("verifier.9", "dead", stored_at=NOW - 100)
    seen = read("alpha", [lease("trainer", "far"), lease("generator.0", "far"), left, dead])
    assert seen.held_on("here") == ["far (run one)"]
    assert seen.held_on("far") == []


def test_a_node_whose_processes_are_on_several_machines_is_no_conflict_of_names() -> None:
    pods = [lease("trainer", "alpha-trainer-0"), lease("generator.a", "alpha-generator-a"), lease("sampler", "alpha-sampler-b")]
    seen = read("alpha", pods)
    assert replace(seen, claimed=False).held_on("alpha-operator-c") == [], "from a machine without such a node"
    assert seen.held_on("alpha-trainer-0") == [], "from one of its own"
    two = read("alpha", [*pods, lease("verifier.x", "far", run="two")])
    assert two.held_on("alpha-trainer-0") == [
        "alpha-generator-a (run one)",
        "alpha-sampler-b (run one)",
        "far (run two)",
    ]


def test_counters_go_on_after_a_restart_and_gauges_are_the_newest() -> None:
    statuses = (
        status("generator", replica="old", age_s=90, groups_generated=40, tokens_per_s=5),
        status("generator", replica="new", groups_generated=2, tokens_per_s=9),
    )
    seen = view(3, statuses=statuses)
    assert seen.total("generator", "groups_generated") == 42
    assert seen.figure("generator", "tokens_per_s") == 9


def test_a_run_that_goes_on_shows_none_of_the_groups_of_its_last_life() -> None:
    def lived(role: str, began_s: float, ended_s: float, replica: str = "r1", **figures: float) -> ServiceStatus:
        made = status(role, replica=replica, age_s=ended_s, **figures)
        return msgspec.structs.replace(made, started_at=NOW - began_s)

    before = (lived("generator", 900, 60, groups_generated=40), lived("trainer", 890, 62))
    assert view(3, statuses=before).total("generator", "groups_generated") == 40, "an ended run has what it made"
    again = view(3, statuses=(before[0], lived("trainer", 20, 1)))
    assert again.total("generator", "groups_generated") == 0, "its generator has not reported yet"
    begun = replace(view(3, statuses=before), begun=NOW - 30)
    assert begun.total("generator", "groups_generated") == 0, "the run was started since"
    replaced = view(3, statuses=(*before, lived("generator", 70, 1, "r2", groups_generated=2)))
    assert replaced.total("generator", "groups_generated") == 42, "a new replica goes on with its node's count"


def test_a_silent_service_is_named_and_a_stopped_one_is_not_alive() -> None:
    alive = tuple(status(role) for role in ROLES if role != "verifier")
    assert view(3, statuses=alive).words == "no word from verifier"
    silent = status("verifier", age_s=60)
    assert view(3, statuses=(*alive, silent)).words == "no word from verifier for 1m"
    stopped = status("verifier", state="stopped")
    assert view(3, statuses=(*alive, stopped)).words == "starting again: verifier"
    assert view(3, statuses=(*alive[1:], stopped)).words == f"no word from {ROLES[0]}, starting again: verifier"
    ended_before = status("verifier", state="stopped", age_s=61)
    assert view(3, statuses=(*alive, ended_before)).words == "no word from verifier for 1m"
    assert view(3, statuses=(*alive, status("verifier"))).words == "working"


def test_a_node_before_its_first_step_says_what_it_does_and_not_that_it_trains() -> None:
    def said(generator: str, trainer: str) -> str:
        states = {"generator": generator, "trainer": trainer}
        return view(0, statuses=tuple(status(role, state=states.get(role, "working")) for role in ROLES)).words

    assert said(STARTING, "loading") == "starting: loading"
    assert said(EVALUATING_BASE, "loading") == "starting: loading"
    assert said(EVALUATING_BASE, FIRST_GROUPS) == "starting: evaluating the base policy"
    far = f"{EVALUATING_BASE}: 3 of 18 answers, 1,204 tokens"
    assert said(far, FIRST_GROUPS) == f"starting: {far}"
    assert said(STARTING, FIRST_GROUPS) == "starting: the generator loads the model"
    assert said(STARTING, STARTING) == "starting: the trainer loads the model"
    assert said("generating", FIRST_GROUPS) == "starting: waiting for the first groups"
    assert said("generating", "training") == "training"


def test_the_score_of_a_node_that_took_its_steps_is_not_its_result_while_the_last_evaluation_runs() -> None:
    def shown(generator: str, loaded: int, scored: int = 0) -> str:
        states = {"generator": generator, "trainer": "finished"}
        statuses = tuple(status(role, state=states.get(role, "working"), policy_version=loaded) for role in ROLES)
        done = structs.replace(position(9), finished=True)
        node = NodeState("alpha", statuses, done, scores=(Evaluation(scored, 0.0, 18),), at=NOW)
        return node_lines(node)[0].plain

    far = f"{EVALUATING_LAST}: 3 of 18 answers, 1,204 tokens"
    assert "held-out 0.000 @0 (last evaluation runs)" in shown(far, 9)
    assert "last evaluation runs" in shown("generating", 7), "the last policy is not loaded yet"
    assert "last evaluation" not in shown("generating", 9) + shown("generating", 9, scored=9)


def test_a_node_whose_generator_cannot_load_its_policy_says_so_and_not_that_it_trains() -> None:
    states = {"generator": f"{LOADING_POLICY} 8, tried 2 times", "trainer": FIRST_GROUPS}
    node = view(8, statuses=tuple(status(role, state=states.get(role, "working")) for role in ROLES))
    assert node.words == "generator: loading policy version 8, tried 2 times"
    assert node.role_words("generator") == "loading policy version 8, tried 2 times"


def test_a_trainer_that_has_taken_steps_does_not_wait_for_the_first_groups() -> None:
    """Its position is written at once, its state every two seconds."""
    states = {"generator": "generating", "trainer": FIRST_GROUPS}
    ahead = view(2, statuses=tuple(status(role, state=states.get(role, "working")) for role in ROLES))
    assert ahead.words == ahead.role_words("trainer") == "training"


def test_a_process_that_is_not_there_yet_is_told_apart_from_one_that_is_gone_in_every_view() -> None:
    """A run that was continued 20 s ago: what its processes said in their last life is old."""
    before = tuple(status(role, age_s=500.0, state="stopped" if role != "sampler" else "working") for role in ROLES)
    half, again = (*before, *(status(role) for role in ROLES[:2])), (*before[:2], status("sampler", age_s=60.0), status("trainer"))
    cases = {
        "nobody yet": (before, 20.0, f"starting: waiting for {', '.join(ROLES)}", "starting", "starting"),
        "two yet": (half, 20.0, "starting: waiting for sampler, trainer", "starting", "starting"),
        "too long ago": (before[2:3], 700.0, "no word from ", "silent", "not answering for 8m"),
        "gone again": (again, 90.0, "no word from sampler for 1m", "silent", "not answering for 1m"),
    }
    for name, (statuses, started_s, words, kind, sampler) in cases.items():
        seen = NodeState("alpha", statuses, position(7), begun=NOW - started_s, at=NOW)
        assert seen.words.startswith(words), (name, seen.words)
        assert (seen.kind, seen.role_words("sampler")) == (kind, sampler), name
        assert (seen.starting("sampler"), "sampler" in seen.gone) == (kind == "starting", kind == "silent"), name
        assert ("alpha-sampler" in unanswered([seen])) == (kind == "silent"), name


def test_a_time_that_is_yet_to_come_by_another_clock_is_never_negative() -> None:
    ahead = tuple(status(role, age_s=-236.0, state="stopped") for role in ROLES)
    node = NodeState("alpha", ahead, position(7), at=NOW)
    assert duration(-236.0) == "0s" and node.role_words("trainer") == "ended 0s ago"
    shown = as_object(SwarmState(NOW, (node,)))["nodes"]["alpha"]["services"]["trainer"]
    assert shown[0]["age_s"] == 0.0
    assert ", 0 seconds ago: " in RunEnd("stopped", NOW + 236.0).sentence("one", NOW)


def test_a_row_names_the_reason_for_most_refusals() -> None:
    refused = status("verifier", refused=160.0, refused_repeated=120.0, refused_stale=40.0)
    row = view(12, statuses=(*(status(role) for role in ROLES if role != "verifier"), refused), rate=7.5)
    assert "refused 160: 120 repeated, 40 stale" in row_lines(row, 65.0)[1]


def test_a_run_is_done_when_the_slowest_node_has_taken_and_published_its_steps() -> None:
    assert not steps_done([], 5)
    assert not steps_done([NodeState("alpha")], 5)
    assert not steps_done([view(5), view(4)], 5)
    unpublished = NodeState("alpha", (), position(5), pointer(4))
    assert not steps_done([view(5), unpublished], 5)
    assert steps_done([view(5), view(9)], 5)


def test_the_last_policy_must_have_been_evaluated() -> None:
    assert not evaluations_done([view(5, evaluated=5), view(5, evaluated=4)], 5)
    assert not evaluations_done([view(5, evaluated=5), view(5)], 5)
    assert evaluations_done([view(5, evaluated=5), view(6, evaluated=6)], 5)
    # Nobody gets a report on an evaluation without any known reward; it has a line in the file.
    unknown = replace(view(5, evaluated=4), scores=(Evaluation(0, 0.1, 200), Evaluation(5, None, 0, unknown=200)))
    assert evaluations_done([view(5, evaluated=5), unknown], 5)


def test_the_step_rate_is_that_of_the_last_minute_or_of_the_newest_two_steps() -> None:
    rate = StepRate()
    assert [rate.update(*each) for each in ((1.0, 1), (31.0, 11), (31.0, 11))] == [None, 20.0, 20.0]
    assert rate.update(131.0, 12) == pytest.approx(0.6)
    assert rate.update(231.0, 13) == pytest.approx(0.6), "a step of a hundred seconds has a rate too"


def test_a_view_that_is_opened_just_before_a_step_does_not_count_from_when_it_was_opened() -> None:
    """The first step ended 88 s before the view was opened, and the second 12 s after."""
    rates, opened = StepRates(), NOW - 12.0

    def looked(at: float, step: int, ended_at: float) -> float | None:
        figures = {"step": float(step), "worked_at": ended_at, "step_seconds": 100.0}
        trainer = structs.replace(status("trainer", **figures), updated_at=at, started_at=NOW - 5000)
        return rates.rated(replace(view(step, statuses=(trainer,)), at=at)).steps_per_minute

    assert looked(opened, 1, NOW - 100.0) == pytest.approx(0.6), "by the length of the step"
    assert looked(NOW, 2, NOW) == pytest.approx(0.6)
    assert looked(NOW + 70.0, 2, NOW) == pytest.approx(0.6), "a minute without a step"


def test_a_node_that_begins_again_is_not_ending_because_its_processes_ended_a_moment_ago() -> None:
    old = tuple(status(role, state=STOPPED, age_s=20.0) for role in ("generator", "trainer"))
    new = tuple(status(role, age_s=1.0) for role in ("verifier", "sampler"))
    state = replace(view(20, statuses=(*old, *new)), begun=NOW - 10.0)
    assert state.kind == "starting" and not any("ending" in words for words in state.absent)
    assert as_object(SwarmState(NOW, (state,)))["nodes"][state.node]["figures_of_step"] is None
    told = replace(state, statuses=(*new, status("trainer", step=14.0)))
    alpha = as_object(SwarmState(NOW, (told,)))["nodes"][state.node]
    assert (alpha["step"], alpha["figures_of_step"]) == (20, 14)


def test_the_step_rate_begins_anew_with_steps_that_are_taken_again_and_with_a_new_process() -> None:
    rate = StepRate()
    seen = [(1.0, 50), (31.0, 70), (40.0, 55), (50.0, 60)]
    assert [rate.update(*each) for each in seen] == [None, 40.0, None, 30.0]
    assert [rate.update(*each, started_at=8000.0) for each in ((9000.0, 61), (9010.0, 62))] == [None, 6.0]


def all_unknown(step: int = 0, **verifier: float) -> NodeState:
    """A node whose trainer waits for groups, with these figures of its verifier."""
    states = {"generator": "generating", "trainer": FIRST_GROUPS}
    figures = {"verifier": verifier, "generator": {"groups_generated": 1531.0}}
    statuses = tuple(status(role, state=states.get(role, "working"), **figures.get(role, {})) for role in ROLES)
    return view(step, statuses=statuses)


def test_a_node_none_of_whose_rewards_is_known_is_not_starting_in_any_view() -> None:
    unknown = all_unknown(scored_local=0.0, unknown_rewards_raised=1531.0, unknown_rewards_timeout=2.0)
    words = "no group scored: all 1,533 rewards are unknown (raised, timeout)"
    assert (unknown.kind, unknown.health, unknown.words, unknown.trouble) == ("running", "warn", words, [words])
    assert findings(unknown) == [words], "the count of unknown rewards is not told twice"
    assert words in row_lines(unknown, 65.0)[-1]
    swarm = SwarmState(NOW, (unknown,))
    assert as_object(swarm)["nodes"]["alpha"]["trouble"] == [words]
    told = swarm_object(swarm, RecentGroups())
    (node,) = told["nodes"]
    assert (told["state"], node["trouble"], node["words"]) == ("running", "unscored", words)
    resumed = all_unknown(9, scored_local=0.0, unknown_rewards_raised=4.0)
    assert (resumed.kind, resumed.health) == ("running", "warn") and "since the verifier started" in resumed.words


def test_a_reward_that_is_always_none_says_that_nothing_can_be_learnt() -> None:
    none = all_unknown(scored_local=0.0, unknown_rewards_not_applicable=1531.0)
    assert none.trouble == ["nothing can be learnt: the reward returned None for all 1,531 answers"]
    assert none.trouble[0] in row_lines(none, 65.0)[-1]


def test_a_node_some_of_whose_rewards_are_known_is_starting_until_its_first_step() -> None:
    some = all_unknown(scored_local=1.0, unknown_rewards_raised=1531.0)
    assert (some.kind, some.health, some.none_scored) == ("starting", "good", "")
    assert all_unknown(scored_local=0.0).kind == "starting", "nothing came to the verifier yet"
    assert not all_unknown(unknown_rewards_raised=4.0).none_scored, "on record are no scored groups"


def test_a_row_is_the_nodes_line_of_status_with_the_time_and_what_is_wrong_below_it() -> None:
    statuses = tuple(status(role, reward_local=0.625) if role == "trainer" else status(role) for role in ROLES)
    well = view(12, evaluated=10, statuses=statuses, rate=7.5)
    head, groups = row_lines(well, 65.0)
    assert head.split()[:5] == ["1:05", "alpha", "●", "running", "step"] and "held-out 0.500 @10 base 0.100 +0.400" in head
    assert "reward 0.625" in groups
    *_, third = row_lines(view(12, evaluated=10, statuses=statuses[:2]), 65.0)
    assert third.strip().startswith(f"no word from {ROLES[2]}, {ROLES[3]}")
    assert "  this start: made –  shared –  taken –" in groups, "nobody has counted"


def test_progress_is_printed_when_something_changes_and_else_once_a_minute(tmp_path: Path) -> None:
    config = load_config(DEMO_CONFIG, {"node": {"var_dir": str(tmp_path)}})
    progress = ProgressView(config, ["alpha"], 0, 5.0)
    waits = view(12, statuses=tuple(status(role) for role in ROLES), rate=2.0)
    late = view(12, statuses=waits.statuses, rate=3.0)
    looks = [
        (waits, 0.0),
        (late, 5.0),
        (late, 55.0),
        (view(13, statuses=waits.statuses, rate=3.0), 57.0),
        (view(13, statuses=waits.statuses, rate=3.0), 117.0),
    ]
    printed = [at for node, at in looks if progress._is_news([node], [], at)]
    assert printed == [0.0, 57.0, 117.0]


def test_after_the_first_step_pace_and_time_left_are_printed_at_once(tmp_path: Path) -> None:
    """The step is known from the trainer's position, and its length two seconds later."""
    progress = ProgressView(load_config(DEMO_CONFIG, {"node": {"var_dir": str(tmp_path)}}), ["alpha"], 10, 5.0)
    others = tuple(status(role) for role in ROLES if role != "trainer")
    before, after = (status("trainer", max_steps=10.0, **figures) for figures in ({}, {"step": 1.0, "step_seconds": 420.0}))
    first, known = (view(1, statuses=(*others, trainer)) for trainer in (before, after))
    assert progress._is_news([first], [], 0.0) and "left" not in row_lines(first, 0.0)[0]
    assert progress._is_news([known], [], 5.0)
    assert "step 1  8.6 steps/h, about 63 min left" in row_lines(known, 5.0)[0]
    assert left_s(view(1, statuses=(*others, status("trainer", step_seconds=420.0)))) is None, "without a last step"


def test_before_the_first_step_its_length_is_estimated_from_the_base_policy_s_evaluation(tmp_path: Path) -> None:
    settings = {"node": {"var_dir": str(tmp_path)}, "generator": {"completions": 4}, "sampler": {"local": 4}}
    progress = ProgressView(load_config(DEMO_CONFIG, settings), ["alpha"], 10, 5.0)
    slow = structs.replace(report(0), n=16, unknown=2, seconds=180.0)
    assert any("16 answers" in line and "3 min" in line for line in progress._notes(replace(view(0), evaluation=slow)))
    assert not progress._notes(replace(view(0), evaluation=structs.replace(slow, seconds=18.0))), "short"
    assert not progress._notes(replace(view(1), evaluation=slow)), "the pace is known"


def test_a_step_that_is_taken_again_after_a_restart_is_told_as_that(tmp_path: Path) -> None:
    progress = ProgressView(load_config(DEMO_CONFIG, {"node": {"var_dir": str(tmp_path)}}), ["alpha"], 10, 5.0)
    notes = [[line.strip().split(",")[0] for line in progress._notes(view(step))] for step in (2, 1, 2, 0, 3)]
    assert notes == [[], ["step 2 is taken again"], [], ["steps 1 to 2 are taken again"], []]


def test_the_generator_of_a_finished_node_is_not_said_to_generate() -> None:
    statuses = tuple(status(role, state="generating" if role == "generator" else "finished") for role in ROLES)
    done = replace(view(10, statuses=statuses), position=TrainerPosition(policy_version=10, consumed_local=0, finished=True))
    assert (done.role_words("generator"), view(9, statuses=statuses).role_words("generator")) == ("idle", "generating")


def test_a_base_score_is_by_the_measure_of_the_newest_or_left_out() -> None:
    """With the rewards 0 and 0.5 half right was a pass; when 1 was seen too, there was no pass."""
    ids = {"held_out": "a" * 64, "scorer": "b" * 64}
    base = Evaluation(0, 0.45, 20, mean_reward=0.225, pass_rule="c" * 64, **ids)
    by_reward = replace(view(30), scores=(base, Evaluation(30, None, 20, mean_reward=0.225, **ids)))
    assert "held-out 0.225r @30 base 0.225r +0.000" in row_lines(by_reward, 65.0)[0]
    for changed in ({"scorer": "d" * 64}, {"held_out": "d" * 64}):
        head, *_ = row_lines(replace(view(30), scores=(base, Evaluation(30, 0.5, 20, **{**ids, **changed}))), 65.0)
        assert "held-out 0.500 @30" in head and "base" not in head, "the verdict says why"
