"""What `swarm rollouts` shows of the records in a run's folder, and what it makes of odd ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.generator.engines.base import Sample
from services.generator.evaluation import SAMPLES_IN_ALL, sampled_places, samples_line
from services.generator.tasks import PromptedTask
from services.trainer.records import MetricsLog, trained_line
from shared.run_records import BATCHES_FILE, METRICS_FILE, SAMPLES_FILE, TRAINED_FILE, BoundedLines, older, refused_file
from shared.tasks.derive import derive_task, task_ref
from swarm_cli.app import app
from swarm_cli.local.control import holding_run
from swarm_cli.observe.run_files import thinned
from swarm_cli.rollouts.judge import marks
from swarm_cli.rollouts.records import TrainedRecords, read_samples, training_outcome
from swarm_cli.runs import NOTE

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\u2066"


def swarm(folder: Path, *arguments: str) -> Result:
    environment = {"SWARM_NODE__VAR_DIR": str(folder), "COLUMNS": "120"}
    return CliRunner(env=environment).invoke(app, ["rollouts", "alpha", *arguments], catch_exceptions=True)


def node_folder(var_dir: Path, run: str = "one") -> Path:
    folder = var_dir / "runs" / run / "alpha"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def refusal(**changes: Any) -> dict[str, Any]:
    values = {"time": 1.0, "reason": "too_old", "detail": "", "sender": "beta", "id": "ab" * 32, "claimed_id": ""}
    return {**values, "swarm_seq": 3, "stored_at": 1.0, **changes}


def excerpt(text: str) -> dict[str, Any]:
    of = {"dataset": "gcd", "seed": 1, "index": 2, "draw": 3, "policy_version": 4, "created_at": 1.0}
    return {**of, "question": text, "completions": 9, "answers": [text, "a\nforged line"]}


def step_line(step: int, group_id: str, **answer: Any) -> str:
    group = {"id": group_id, "origin": "local", "sender": "alpha", "fate": "trained", "factor": 1.0}
    answers = [{"place": 0, "advantage": 1.5, **answer}]
    return trained_line(step, 2.0, updated=True, updates=1, groups=[{**group, "answers": answers}])


def test_refusals_are_shown_with_their_reason_and_hostile_text_is_seen_and_not_obeyed(tmp_path: Path) -> None:
    lines = [
        refusal(id="", claimed_id="cd" * 8, reason="signature"),
        refusal(sender=f"x{ESCAPES}", detail=ESCAPES, group=excerpt(ESCAPES)),
        {"time": "soon"},
        refusal(id="ef" * 32, sender="gamma", reason="copied", detail="says what delta said", group=excerpt("what is 1?")),
    ]
    refused_file(node_folder(tmp_path), "0").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"time": 9, "rea')
    shown = swarm(tmp_path, "--refused")
    assert shown.exit_code == 0, shown.output
    for words in (
        "refused:   signature",
        "text:      not kept, refused before anything",
        "copied: says what delta said",
        "(7 more",
    ):
        assert words in shown.stdout
    assert "  forged line" in shown.stdout and "\nforged line" not in shown.stdout
    assert not set(ESCAPES) & set(shown.stdout) - set("]0;owned[2J"), "others' words must not act on a terminal"
    found = [json.loads(line) for line in swarm(tmp_path, "--refused", "--json", "--from", "gamma").stdout.splitlines()]
    assert [(each["id"], each["group"]["question"]) for each in found] == [("ef" * 32, "what is 1?")]
    assert swarm(tmp_path, "--refused", "--json").stdout.isascii()
    assert "copied" in swarm(tmp_path, "--refused", "--group", "efef").stdout
    assert swarm(tmp_path, "--refused", "--group", "1234").stdout == ""


def test_held_out_answers_are_shown_version_by_version(tmp_path: Path) -> None:
    def sample(text: str, reward: float) -> dict[str, Any]:
        of = {"dataset": "gcd", "seed": 1, "index": 2, "question": f"which?{ESCAPES}", "reference": "7"}
        return {
            **of,
            "text": text,
            "characters": len(text),
            "reward": reward,
            "passed": reward == 1.0,
            "tokens": 2,
            "finish_reason": "stop",
        }

    lines = BoundedLines(node_folder(tmp_path) / SAMPLES_FILE, 10_000)
    for version, (text, reward) in enumerate([(f"five{ESCAPES}", 0.0), ("seven", 0.5), ("7", 1.0)]):
        lines.append(json.dumps({"policy_version": 25 * version, "time": 1.0, "samples": [sample(text, reward)]}))
    shown = swarm(tmp_path, "--eval", "gcd").stdout
    assert [shown.index(word) for word in ("five", "seven", "1 (right)")] == sorted(
        shown.index(word) for word in ("five", "seven", "1 (right)")
    )
    assert "0 (wrong)" in shown and "0.5 (part of the reward)" in shown, "as `swarm rollouts` without --eval says it"
    assert not set("\x1b\x07\u202e\u2066") & set(shown)
    few = swarm(tmp_path, "--eval", "gcd", "--limit", "2").stdout
    assert "seven" not in few and "1 version in between is left out" in few
    assert "2 versions before are left out" in swarm(tmp_path, "--eval", "gcd", "--limit", "1").stdout
    versions = [json.loads(line)["policy_version"] for line in swarm(tmp_path, "--eval", "gcd", "--json").stdout.splitlines()]
    assert versions == [0, 25, 50]
    assert "choose among gcd" in str(swarm(tmp_path, "--eval", "chain_sum").exception)
    assert "leave one out" in str(swarm(tmp_path, "--eval", "gcd", "--refused").exception)


def test_the_same_few_questions_of_every_dataset_are_kept() -> None:
    datasets = ["a"] * 50 + ["b"] * 2 + [f"c{number}" for number in range(40)]
    places = sampled_places(datasets)
    assert len(places) == SAMPLES_IN_ALL and {"a", "b", "c0"} <= {datasets[place] for place in places}
    assert sampled_places(["a"] * 50) == list(range(SAMPLES_IN_ALL)) and sampled_places([]) == []


def test_a_step_that_was_trained_again_counts_as_it_was_last_and_one_of_another_run_says_nothing(tmp_path: Path) -> None:
    folder, lines = node_folder(tmp_path), BoundedLines(node_folder(tmp_path) / TRAINED_FILE, 600)
    records = TrainedRecords(folder)
    assert records.for_step(1) is None and records.newest is None
    for step in (1, 2, 3, 2):
        lines.append(step_line(step, "aa" * 32, weight=float(step), tokens=5, kept=4, clipped=0.0, truncated=0))
    assert older(folder / TRAINED_FILE).exists(), "two files are read as one"
    fate = training_outcome(records, 2, "aa" * 32)
    assert fate.group is not None and (fate.group.answers[0].weight, records.newest) == (2.0, 3)
    assert (
        training_outcome(records, 2, "bb" * 32).group is None
        and "not on record" in training_outcome(records, 2, "bb" * 32).sentence()
    )
    assert training_outcome(records, 9, "aa" * 32).sentence() == "not trained on yet"
    with (folder / TRAINED_FILE).open("a") as torn:
        torn.write(step_line(4, "aa" * 32)[:-20])
    assert records.for_step(4) is None
    BoundedLines(folder / TRAINED_FILE, 10_000).append(step_line(5, "cc" * 32))
    assert (found := records.for_step(5)) is not None and found.groups[0].id == "cc" * 32


def test_a_group_is_not_trained_on_yet_while_the_trainer_here_takes_its_first_step(tmp_path: Path) -> None:
    elsewhere, here = TrainedRecords(tmp_path), node_folder(tmp_path)
    MetricsLog(here, 0)
    assert training_outcome(TrainedRecords(here), 1, "aa" * 32).yet
    assert not training_outcome(elsewhere, 1, "aa" * 32).yet, "no trainer has been here"
    (here / METRICS_FILE).write_text('{"step": 1}\n')
    assert not training_outcome(TrainedRecords(here), 1, "aa" * 32).yet, "it was taken, and its record is gone"


def test_the_run_that_runs_is_looked_at_though_another_has_newer_records(tmp_path: Path) -> None:
    written = refused_file(node_folder(tmp_path, "one"), "0")
    written.write_text(json.dumps(refusal(reason="of_an_earlier_run")) + "\n")
    node_folder(tmp_path, "two")
    assert "of_an_earlier_run" in swarm(tmp_path, "--refused", "--json").output
    with holding_run(tmp_path / "runs" / "two"):
        assert "of_an_earlier_run" not in swarm(tmp_path, "--refused", "--json").output


def test_the_newest_run_is_looked_at_unless_one_is_named(tmp_path: Path) -> None:
    for run, reason in (("old", "banned"), ("new", "copied")):
        path = refused_file(node_folder(tmp_path, run), "0")
        path.write_text(json.dumps(refusal(reason=reason)) + "\n")
    os.utime(refused_file(node_folder(tmp_path, "old"), "0"), (1, 1))
    assert "copied" in swarm(tmp_path, "--refused").stdout and "banned" in swarm(tmp_path, "--refused", "--run", "old").stdout
    assert "no run 'none'" in str(swarm(tmp_path, "--refused", "--run", "none").exception)


def test_of_many_versions_the_first_the_last_and_some_between_are_shown() -> None:
    answers: list[Any] = [(version, None) for version in range(101)]
    assert [version for version, _ in thinned(answers, 3)] == [0, 50, 100]
    assert [version for version, _ in thinned(answers, 1)] == [100] and thinned(answers[:2], 5) == tuple(answers[:2])


def test_a_destroyed_record_of_batches_is_named(tmp_path: Path) -> None:
    file = node_folder(tmp_path) / BATCHES_FILE
    ended = {"node_url": "nats://127.0.0.1:1", "swarm_url": "none", "options": {}}
    (file.parent.parent / NOTE).write_text(json.dumps(ended))
    file.write_bytes(bytes(range(1, 256)) * 20 + b"\n")
    shown = swarm(tmp_path, "--run", "one")
    assert shown.exit_code != 0 and str(file) in str(shown.exception), shown.output


def test_of_several_rewards_the_value_of_each_stands_in_the_samples(tmp_path: Path) -> None:
    task, parts = derive_task(task_ref("gcd", seed=1, index=0)), {"r.py:right": 1.0, "r.py:tone": None}
    asked, said = [PromptedTask(task, [1])] * 2, [Sample((), text, "stop", None) for text in ("6", "5")]
    line = samples_line(asked, said, [(0.5, None), (0.0, None)], [parts, {}], policy_version=3, time_s=1.0, scorer="ab" * 32)
    (tmp_path / "samples.jsonl").write_text(line + "\n")
    (read,) = read_samples(tmp_path)
    assert [each.parts for each in read.samples] == [parts, {}] and read.scorer == "ab" * 32


@pytest.mark.parametrize(
    ("reward", "passed", "parts", "told"),
    [
        (0.1, False, {"accuracy": 0.0, "length": 1.0}, "wrong; 0.1 of length"),
        (0.3, False, {"accuracy": None, "length": 1.0, "format": 0.5, "x": 0.0}, "wrong; 0.3 of length and format"),
        (0.45, False, {"penalty": -0.05, "accuracy": 0.5}, "part of the reward"),
        (0.6, False, {"accuracy": 0.5, "length": 1.0}, "part of the reward"),
        (0.5, False, {}, "part of the reward"),
        (0.0, False, {"accuracy": 0.0, "length": 0.0}, "wrong"),
        (1.1, True, {"accuracy": 1.0, "length": 1.0}, "right"),
        (0.1, None, {"accuracy": 0.0, "length": 1.0}, "no pass defined"),
    ],
)
def test_a_wrong_answer_that_earned_only_a_bonus_is_wrong_and_says_of_which_reward(
    reward: float, passed: bool | None, parts: dict[str, float | None], told: str
) -> None:
    assert marks(reward, passed, parts) == told
