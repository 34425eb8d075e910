"""What `swarm eval` asks, what it says of tasks that may have been trained on, and that its report
is all it prints on standard output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.config import NodeConfig, TaskSpec, scorers_id
from shared.contracts.messages import Task
from shared.tasks import held_out_tasks
from shared.tasks.held_out import held_out_id
from swarm_cli.errors import CommandError
from swarm_cli.model.evaluate import Answered, EvalTasks, RecordedSet, eval_tasks, rates_at_k, recorded_set

SUMS = TaskSpec(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2})
GCD = TaskSpec(dataset="gcd")


def config(tasks: int = 60, *specs: TaskSpec, **others: Any) -> NodeConfig:
    return NodeConfig.model_validate(
        {"eval": {"tasks": tasks, **others}, "tasks": [each.model_dump() for each in specs or (SUMS, GCD)]}
    )


def asked(
    chosen: NodeConfig, n: int | None = None, recorded: RecordedSet | None = None, sources: list[TaskSpec] | None = None
) -> EvalTasks:
    return eval_tasks(chosen, sources or chosen.tasks, n, recorded, lambda task: True)


def record_of(chosen: NodeConfig, n: int) -> RecordedSet:
    tasks = held_out_tasks(chosen.tasks, n, draw=chosen.eval.draw)
    return RecordedSet(len(tasks), held_out_id(tasks), changed=False)


def test_what_a_dataset_prints_while_it_makes_tasks_is_kept_from_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    assert len(asked(config(3, TaskSpec(dataset="bf"))).tasks) == 3
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err, "the dataset prints nothing any more: this test needs another"


def test_as_many_tasks_are_asked_as_the_configuration_holds_out() -> None:
    found = asked(config(60))
    assert (len(found.tasks), found.not_held_out, found.note) == (60, 0, "")
    assert found.tasks == held_out_tasks(config().tasks, 60)
    assert asked(config(60, draw=3)).tasks != found.tasks


def test_of_more_tasks_than_are_held_out_it_is_said_how_many_may_be_trained_on() -> None:
    fewer, more = asked(config(60), 30), asked(config(60), 200)
    assert (len(fewer.tasks), fewer.not_held_out, fewer.note) == (30, 0, "")
    assert (len(more.tasks), more.not_held_out) == (200, 140)
    assert more.note.startswith("140 of these 200 tasks are not among the 60 that eval.tasks holds out: a node with this")


def test_without_held_out_tasks_their_number_has_to_be_said() -> None:
    with pytest.raises(CommandError, match=r"eval\.tasks is 0, so no task is held out: say with --n how many"):
        asked(config(0))
    assert asked(config(0), 5).not_held_out == 5
    assert asked(config(0), 1).note == (
        "1 of these 1 tasks is not among the 0 that eval.tasks holds out: a node with this configuration may train on it"
    )


def test_a_nodes_folder_is_asked_what_the_node_held_out_whatever_the_configuration_says_now() -> None:
    """Such as one started with SWARM_EVAL__TASKS=60."""
    run = record_of(config(200), 60)
    found = asked(config(200), None, run)
    assert (found.tasks, found.not_held_out, found.note) == (held_out_tasks(config().tasks, 60), 0, "")
    more = asked(config(200), 200, run)
    assert more.not_held_out == 140
    assert more.note == "140 of these 200 tasks are not among the 60 that the node held out: it may have trained on them"
    only_sums = asked(config(200), 60, run, [SUMS])
    assert only_sums.not_held_out == 30


def test_a_set_with_fewer_questions_than_eval_tasks_is_found_again() -> None:
    """The second source has few different questions, and the first keeps its share."""
    few = TaskSpec(dataset="gcd", config={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 2})
    chosen = config(60, SUMS, few)
    run = record_of(chosen, 60)
    assert run.n < 60
    assert (len(asked(chosen, None, run).tasks), asked(chosen, None, run).not_held_out) == (run.n, 0)


def test_tasks_that_do_not_fit_the_model_are_left_out_as_the_node_leaves_them_out() -> None:
    chosen = config(20)

    def fits(task: Task) -> bool:
        return task.ref.dataset == "gcd"

    tasks = [task for task in held_out_tasks(chosen.tasks, 20) if fits(task)]
    run = RecordedSet(len(tasks), held_out_id(tasks), changed=False)
    found = eval_tasks(chosen, chosen.tasks, None, run, fits)
    assert (found.tasks, found.not_held_out) == (tasks, 0)
    with pytest.raises(CommandError, match="none of the 20 tasks leaves room for an answer"):
        eval_tasks(chosen, chosen.tasks, None, None, lambda task: False)


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (
            RecordedSet(60, "0" * 64, changed=False),
            "names another held-out set, so it may have trained on some of these tasks: give",
        ),
        (RecordedSet(60, None, changed=True), "held-out set changed during its run, so it may have trained on some"),
    ],
)
def test_a_set_that_is_not_the_nodes_is_told(recorded: RecordedSet, said: str) -> None:
    found = asked(config(200), None, recorded)
    assert (len(found.tasks), found.not_held_out) == (60, None)
    assert said in found.note


def test_the_set_on_record_is_read_of_a_nodes_folder_and_of_its_checkpoints(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    assert recorded_set(tmp_path) is None
    first = {"policy_version": 0, "n": 60, "pass_rate": 0.1, "held_out": "a" * 64, "scorer": "c" * 64}
    lines: list[dict[str, Any]] = [first, {"n": 10**30}, {"n": "many"}, {"n": None}, {**first, "n": 10**30}]
    write(tmp_path, lines)
    assert recorded_set(tmp_path) == recorded_set(checkpoint) == RecordedSet(60, "a" * 64, changed=False, scorer="c" * 64)
    write(tmp_path, [*lines, {**first, "n": 70, "held_out": "b" * 64}])
    assert recorded_set(tmp_path) == RecordedSet(70, "b" * 64, changed=True, scorer="c" * 64)
    write(tmp_path, [{"policy_version": 0, "n": 60, "pass_rate": 0.1, "held_out": "a" * 64}])
    assert recorded_set(tmp_path) == RecordedSet(60, None, changed=False), "its id was of the questions and their verifiers"
    assert recorded_set(tmp_path / "no such model") is None


def test_answers_without_a_known_reward_and_another_reward_are_no_other_questions(tmp_path: Path) -> None:
    """6 of 10 answers had a known reward, then 4: the node held out 10 tasks all the time."""
    (tmp_path / "checkpoints").mkdir()
    chosen = config(10)
    tasks = held_out_tasks(chosen.tasks, 10)
    line = {"pass_rate": 0.5, "mean_reward": 0.5, "held_out": held_out_id(tasks), "scorer": "c" * 64}
    write(tmp_path, [{**line, "policy_version": 0, "n": 6, "unknown": 4}, {**line, "policy_version": 5, "n": 4, "unknown": 6}])
    recorded = recorded_set(tmp_path)
    assert recorded is not None and (recorded.n, recorded.changed) == (10, False)
    found = asked(chosen, None, recorded)
    assert ([task.ref for task in found.tasks], found.not_held_out) == ([task.ref for task in tasks], 0)
    assert "another reward" in found.note and "held-out set" not in found.note


def test_a_nodes_rule_of_what_passes_is_taken_over_with_the_rewards_that_it_saw(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    chosen = config(10)
    line = {"policy_version": 5, "n": 10, "mean_reward": 0.2, "reward_values": {"mine": [0.0, 0.5, 1.0]}}
    write(tmp_path, [{**line, "held_out": held_out_id(held_out_tasks(chosen.tasks, 10)), "scorer": scorers_id(chosen.tasks)}])
    assert asked(chosen, None, recorded_set(tmp_path)).values == {"mine": [0.0, 0.5, 1.0]}
    write(tmp_path, [{**line, "scorer": "c" * 64}])
    assert asked(chosen, None, recorded_set(tmp_path)).values == {}


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "eval.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def answer(dataset: str, question: str, passed: bool | None, reward: float | None = 0.5) -> Answered:
    return Answered(dataset, question, "1", "text", reward, passed)


def passed(answers: list[Answered], k: int) -> dict[str, float | None]:
    return {name: rates.passed for name, rates in rates_at_k(answers, k).items()}


def test_the_interval_of_a_pass_rate_is_wilsons_and_follows_the_questions_where_their_answers_are_alike() -> None:
    alone = [answer("a", str(place), place < 3) for place in range(12)]
    # Wilson's for 3 of 12: middle (0.25 + z²/24) / (1 + z²/12), by hand.
    assert rates_at_k(alone, 1)["a"].interval == pytest.approx((0.0889, 0.5323), abs=1e-4)
    fourfold = [each for each in alone for _ in range(4)]
    low, high = rates_at_k(fourfold, 4)["a"].interval or (0.0, 0.0)
    assert high - low > 0.4, "four equal answers to a question say no more than one"
    failed = [answer("a", str(place), False) for place in range(6) for _ in range(4)]
    low, high = rates_at_k(failed, 4)["a"].interval or (0.0, 0.0)
    assert low == 0.0 and high == pytest.approx(0.3903, abs=1e-4), "no pass in six questions is not certainty"
    assert rates_at_k([answer("a", "1", None)], 1)["a"].interval is None


def test_pass_at_k_is_the_share_of_questions_of_which_an_answer_passes() -> None:
    of_questions = {("a", "1"): (False, True, False), ("a", "2"): (False, False, False), ("b", "3"): (True, True, True)}
    answers = [answer(*name, flag) for name, flags in of_questions.items() for flag in flags]
    assert passed(answers, 3) == {"": 2 / 3, "a": 1 / 2, "b": 1.0}
    assert passed([answer("a", "1", None)] * 2, 2) == {"": None, "a": None}


def test_a_question_without_a_known_reward_is_left_out_of_pass_at_k_and_one_unknown_answer_is_not() -> None:
    unknown = answer("a", "1", False, None)
    assert passed([unknown, unknown, answer("a", "2", True), unknown], 2) == {"": 1.0, "a": 1.0}
