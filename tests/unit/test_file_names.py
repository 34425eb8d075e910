"""A dataset that is somebody's own file is shown by the file's name, which the generator that read
it recorded, and by the first digits of its hash; everywhere the same.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from services.generator.service import record_file_names
from shared.config import NodeConfig, TaskSpec
from shared.contracts.control import NodeRecord
from shared.contracts.messages import BatchItem
from shared.contracts.wire import ModelIdentity
from shared.identity.statements import CheckedStatement, SignatureStatus
from shared.run_records import FILE_NAMES_FILE, RefusedExcerpt, RefusedGroup
from swarm_cli.dashboard.group_page import step_object
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.dashboard.run_records import Cell, TrainedGroups
from swarm_cli.errors import CommandError
from swarm_cli.file_names import CHARACTERS, FileNames, file_names
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.rollouts.judge import Choice, Judge
from swarm_cli.rollouts.records import BatchedGroup, HeldOutSample, Samples, TrainingOutcome
from swarm_cli.rollouts.refused import show_refusal
from swarm_cli.rollouts.shown import View, by_question, show, show_question
from tests.unit.page_batches import NOW, batch, item

MINE, OTHER, ELSEWHERE = ("file_" + digit * 40 for digit in "123")
NAMES = FileNames({MINE: ["questions.jsonl"], OTHER: ["questions.jsonl"]})
SHOWN = "questions.jsonl (11111111)"


def sources(**files: str) -> list[TaskSpec]:
    return [TaskSpec(dataset="gcd"), *(TaskSpec(source="file", dataset=name, path=path) for name, path in files.items())]


def test_two_files_of_one_name_are_told_apart_and_what_is_no_known_file_has_its_own_name() -> None:
    assert [NAMES.shown(each) for each in (MINE, OTHER, ELSEWHERE, "gcd")] == [
        SHOWN,
        "questions.jsonl (22222222)",
        ELSEWHERE,
        "gcd",
    ]
    assert NAMES.meant("questions.jsonl") - {"questions.jsonl"} == {MINE, OTHER}
    assert NAMES.meant(SHOWN) - {SHOWN} == {MINE} == NAMES.meant(MINE) and NAMES.meant("gcd") == {"gcd"}


def test_a_generator_records_the_names_of_its_files_once_and_a_name_that_changed_again(tmp_path: Path) -> None:
    record_file_names(tmp_path / "alpha", sources())
    assert not (tmp_path / "alpha").exists(), "a node without files has nothing to record"
    for _ in range(2):
        record_file_names(tmp_path / "alpha", sources(**{MINE: "/data/a.jsonl", OTHER: "folder/"}))
    assert len((tmp_path / "alpha" / FILE_NAMES_FILE).read_text().splitlines()) == 2
    assert file_names(tmp_path).shown(MINE) == "a.jsonl (11111111)" and file_names(tmp_path).file(OTHER) == "folder"
    record_file_names(tmp_path / "alpha", sources(**{MINE: "renamed.jsonl"}))
    assert file_names(tmp_path).file(MINE) == "renamed.jsonl" and file_names(tmp_path).file(OTHER) == "folder"
    (tmp_path / "beta").mkdir()
    (tmp_path / "beta" / FILE_NAMES_FILE).write_text('{"dataset": ["odd"]}\n{"dataset"')
    record_file_names(tmp_path / "beta", sources(**{MINE: "b.jsonl"}))
    assert file_names(tmp_path).file(MINE) == "b.jsonl or renamed.jsonl", "two nodes call the same rows differently"


def test_an_entry_that_names_its_dataset_tells_the_name_without_a_record() -> None:
    assert file_names(None, sources(**{MINE: "/data/a.jsonl"})).file(MINE) == "a.jsonl"
    assert file_names(None, [TaskSpec(source="file", path="a.jsonl")]).file(MINE) == "", "its rows are not known"


def test_a_record_that_somebody_else_wrote_is_cut_made_visible_and_never_waited_for(tmp_path: Path) -> None:
    for node in ("pipe", "link", "odd"):
        (tmp_path / node).mkdir()
    os.mkfifo(tmp_path / "pipe" / FILE_NAMES_FILE)
    (tmp_path / "link" / FILE_NAMES_FILE).symlink_to("/etc/passwd")
    lines = [
        json.dumps({"dataset": MINE, "file": "\u202e\x1b[2J" + "x" * 1000}),
        json.dumps({"dataset": "gcd", "file": "not a file"}),
        json.dumps({"dataset": OTHER, "file": 7}),
        "[" * 10_000,
        "\udcff",
        '{"dataset"',
    ]
    (tmp_path / "odd" / FILE_NAMES_FILE).write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    found = file_names(tmp_path)
    assert found.file(MINE).startswith(r"\u202e\x1b[2Jxxx") and len(found.file(MINE)) == CHARACTERS
    assert found.shown(MINE).endswith("… (11111111)")
    assert found.shown("gcd") == "gcd" and found.shown(OTHER) == OTHER
    assert file_names(tmp_path / "nothing").shown(MINE) == MINE


def test_the_page_calls_a_file_by_its_name_in_selectors_in_lists_and_under_nodes() -> None:
    record = NodeRecord(
        node="alpha", public_key="U", model=ModelIdentity(name="m", tokenizer_hash="a" * 64), tasks=[MINE, ELSEWHERE, "gcd"],
        policy_version=1, software="", updated_at=NOW,
    )  # fmt: skip
    node = NodeState("alpha", at=NOW, entry=CheckedStatement(record, SignatureStatus.SIGNED, "U", ""))
    recent = RecentGroups()
    made = batch(1, item("alpha", "beta", 1.0, dataset=MINE))
    recent.take("alpha", made)
    trained = TrainedGroups((Cell("alpha", "beta", MINE, 3), Cell("alpha", "beta", "gcd", 2)))
    told = swarm_object(SwarmState(NOW, (node,), (), True), recent, trained, names=NAMES)
    assert told["nodes"][0]["tasks"] == [SHOWN, ELSEWHERE, "gcd"]
    assert [dataset for _, _, dataset, _ in told["exchange"]] == [SHOWN, "gcd"]
    assert told["groups"][0]["dataset"] == SHOWN == step_object("alpha", made, NAMES)["groups"][0]["dataset"]


def of_file(dataset: str) -> BatchItem:
    return item("alpha", "alpha", 1.0, 0.0, dataset=dataset)


def test_rollouts_refusals_and_held_out_answers_call_it_the_same() -> None:
    made = batch(4, of_file(MINE))
    judge = Judge(NodeConfig.model_validate({"tasks": [{"dataset": "gcd"}]}), names=NAMES)
    console = Console(file=io.StringIO(), width=200)
    show(BatchedGroup(made, made.items[0]), TrainingOutcome(None, None), Choice(), View(console, judge, 80))
    excerpt = RefusedExcerpt(MINE, 1, 2, 3, 4, NOW, "which?", 1, ["7"])
    refused = RefusedGroup(
        time=NOW, reason="repeated", detail="", sender="beta", id="a" * 64, claimed_id="", swarm_seq=1, stored_at=NOW, group=excerpt
    )
    show_refusal(refused, console, 80, NAMES)
    sample = HeldOutSample(MINE, 1, 2, "which?", "7", "7", 1, 1.0, 1, "stop")
    ((_, answers),) = by_question([Samples(0, NOW, [sample])], "questions.jsonl", "here", NAMES).items()
    show_question(answers, 1, console, 80, NAMES)
    assert console.file.getvalue().count(f" · {SHOWN} seed ") == 3  # type: ignore[attr-defined]
    with pytest.raises(CommandError, match=r"choose among questions\.jsonl \(11111111\)"):
        by_question([Samples(0, NOW, [sample])], "gcd", "here", NAMES)


def test_a_question_that_begins_with_its_label_is_not_labelled_again() -> None:
    console = Console(file=io.StringIO(), width=200)
    for question in ("Question: What is 1 + 1?\nAnswer:", "Which?"):
        show_question([(0, HeldOutSample(MINE, 1, 2, question, "7", "7", 1, 1.0, 1, "stop"))], 1, console, 80, NAMES)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.lower().count("question:") == 2 and "\nQuestion: What is 1 + 1?\n" in said and "\nquestion:  Which?\n" in said


def test_groups_are_chosen_by_a_files_name() -> None:
    made = batch(4, of_file(MINE), of_file(OTHER), of_file("gcd"))

    def chosen(asked: str) -> list[str]:
        return [found.item.scored.group.task.ref.dataset for found in Choice(datasets=NAMES.meant(asked)).groups(made)]

    assert chosen("questions.jsonl") == [MINE, OTHER] and chosen(SHOWN) == [MINE] == chosen(MINE) and chosen("gcd") == ["gcd"]


def test_of_several_files_in_a_configuration_the_recorded_one_is_named_with_its_verifier() -> None:
    files = [{"path": "a.jsonl", "verifier": "final_number"}, {"path": "questions.jsonl", "verifier": "exact"}]
    config = NodeConfig.model_validate({"tasks": [{"source": "file", **file} for file in files]})
    scored = of_file(MINE).scored
    assert (Judge(config).file(scored), Judge(config).verifier(scored)) == ("a.jsonl or questions.jsonl", "exact or final_number")
    judge = Judge(config, names=NAMES)
    assert (judge.file(scored), judge.verifier(scored)) == ("questions.jsonl", "exact")
    again = replace(scored, group=replace(scored.group, node="beta"))
    assert judge.file(again) == "questions.jsonl"
