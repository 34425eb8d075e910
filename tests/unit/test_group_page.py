"""What the page of one group is told: its answers cut and made visible, who judged them, what the
trainer made of them, and which text a token adds.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from services.trainer.records import trained_line
from shared.config import NodeConfig, load_config
from shared.contracts.codec import pack_ids, pack_logprobs
from shared.contracts.messages import Completion
from shared.run_records import TRAINED_FILE
from shared.text import visible_json
from swarm_cli.dashboard.group_page import TEXT_CHARACTERS, group_object, heat, step_object
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.rollouts.judge import Choice, Judge
from swarm_cli.rollouts.records import BatchedGroup, TrainedRecords, training_outcome
from swarm_cli.rollouts.shown import View, left_words, show
from tests.integration.page_swarm import ROOT
from tests.unit.page_batches import NOW, batch, item

MODEL = ROOT / "models" / "base"
JUDGE = Judge(load_config(DEMO_CONFIG))
NO_RECORD = (TrainedRecords(None), JUDGE)


def test_a_group_is_cut_and_what_acts_in_it_is_shown() -> None:
    long = "x" * (TEXT_CHARACTERS + 50) + "\u202e"
    made = batch(4, item("alpha", "beta", 1.0, 0.0, text=long))
    found = group_object("alpha", made, 0, MODEL, *NO_RECORD)
    assert found is not None and found["completions"][0]["text"].endswith("… (51 more characters)")
    assert group_object("alpha", made, 1, MODEL, *NO_RECORD) is None
    shown = group_object("alpha", batch(4, item("alpha", "beta", 1.0, text="\u202eevil\x00")), 0, MODEL, *NO_RECORD)
    assert shown is not None and shown["completions"][0]["text"] == r"\u202eevil\x00"
    many = step_object("alpha", batch(4, *(item("alpha", "beta", 1.0) for _ in range(130))))
    assert len(many["groups"]) == 128 and many["left_out"] == 2


def test_every_view_of_a_group_says_how_many_answers_left_it_and_why() -> None:
    made = batch(4, item("alpha", "alpha", 0.0))
    scored = replace(made.items[0].scored, unknown={"raised": 2, "timeout": 1})
    made = replace(made, items=[replace(made.items[0], scored=scored)])
    left = "3 more left the group: raised 2, timeout 1"
    recent = RecentGroups()
    recent.take("alpha", made)
    (line,) = swarm_object(SwarmState(NOW, ()), recent)["groups"]
    found = group_object("alpha", made, 0, MODEL, *NO_RECORD)
    assert found is not None
    assert line["left"] == step_object("alpha", made)["groups"][0]["left"] == found["left"] == left
    console = Console(width=200, file=io.StringIO(), record=True)
    show(BatchedGroup(made, made.items[0]), training_outcome(NO_RECORD[0], 4, scored.group_id), Choice(), View(console, JUDGE, 80))
    assert left in console.export_text()
    assert left_words(replace(scored, unknown={})) == "", "nothing is said of a whole group"
    assert left_words(replace(scored, rewards=[])) == "", "a group without any known reward keeps its answers"


def test_a_group_says_what_the_trainer_made_of_each_answer(tmp_path: Path) -> None:
    made = batch(4, item("alpha", "beta", 1.0, 0.0))
    answers = [{"place": 0, "advantage": 1.5, "weight": 0.25, "tokens": 9, "kept": 9}]
    told = {"id": made.items[0].scored.group_id, "origin": "foreign", "sender": "beta", "fate": "trained", "answers": answers}
    (tmp_path / TRAINED_FILE).write_text(trained_line(4, 2.0, updated=True, updates=1, groups=[told]) + "\n")
    found = group_object("alpha", made, 0, MODEL, TrainedRecords(tmp_path), JUDGE)
    assert found is not None and found["training"]["fate"] == "trained" and found["used"].startswith("trained on in step 4, ")
    assert found["completions"][0]["training"]["advantage"] == 1.5
    assert found["completions"][1]["training"] is None


def test_a_group_says_who_judged_which_part_of_each_answer() -> None:
    made = batch(4, item("alpha", "beta", 1.0, 0.0, text="so <answer>4\u202e2</answer>"))
    found = group_object("alpha", made, 0, MODEL, *NO_RECORD)
    assert found is not None and found["judged_by"].startswith("reasoning_gym; a near miss from another node counts as wrong")
    assert [each["judged"]["read_as"] for each in found["completions"]] == [r"4\u202e2"] * 2
    plain = group_object("alpha", batch(4, item("alpha", "beta", 1.0, text="42")), 0, MODEL, *NO_RECORD)
    assert plain is not None and plain["completions"][0]["judged"]["read_as"] is None


def test_a_foreign_answer_that_does_not_pass_is_shown_as_wrong_and_with_no_reward_that_nobody_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # otherwise a table goes to the pipe that a test's output is
    made = batch(4, item("alpha", "beta", -1.0, -2.0), item("alpha", "alpha", -1.0, -2.0))
    foreign, local = (replace(each.scored, passed=[True, False]) for each in made.items)
    paid = load_config(DEMO_CONFIG, {"verifier": {"foreign_partial_credit": True}})
    for scored, judge, replaced in ((foreign, JUDGE, True), (foreign, Judge(paid), False), (local, JUDGE, False)):
        right, wrong = (judge.of(scored, place, "6", scored.rewards[place]) for place in (0, 1))
        assert (right.marks, right.replaced) == ("right", False)
        assert (wrong.marks, wrong.replaced) == (("counts as wrong", True) if replaced else ("wrong", False))
        console = Console(record=True, width=120, file=io.StringIO())
        shown = replace(made.items[0], scored=scored)
        fate = training_outcome(NO_RECORD[0], 4, scored.group_id)
        show(BatchedGroup(made, shown), fate, Choice(), View(console, judge, 80))
        assert ("-2 (" in console.export_text()) is not replaced


def test_a_file_is_judged_by_the_verifier_of_its_source_and_by_none_if_it_is_not_in_the_configuration() -> None:
    made = batch(4, item("alpha", "beta", 1.0))
    scored = made.items[0].scored
    ref = replace(scored.group.task.ref, dataset="file_" + "0" * 40)
    of_file = replace(scored, group=replace(scored.group, task=replace(scored.group.task, ref=ref)))

    def judged(*files: dict[str, str]) -> str:
        tasks = [{"dataset": "gcd"}, *({"source": "file", **file} for file in files)]
        return Judge(NodeConfig.model_validate({"tasks": tasks})).verifier(of_file)

    first, second = {"path": "a.jsonl", "verifier": "final_number"}, {"path": "b.jsonl", "verifier": "exact"}
    assert judged(first) == "final_number" and judged(first, second) == "exact or final_number"
    assert judged().startswith("not known: the file is not in this configuration")
    assert judged(first | {"dataset": "file_" + "1" * 40}).startswith("not known")

    def named(*files: dict[str, str]) -> str:
        tasks = [{"dataset": "gcd"}, *({"source": "file", **file} for file in files)]
        judge = Judge(NodeConfig.model_validate({"tasks": tasks}))
        assert judge.file(scored) == "", "a dataset that no file is"
        found = group_object("alpha", replace(made, items=[replace(made.items[0], scored=of_file)]), 0, MODEL, NO_RECORD[0], judge)
        assert found is not None and found["file"] == (judge.file(of_file) or None)
        return judge.file(of_file)

    assert named(first | {"path": "/data/mine.jsonl"}) == "mine.jsonl" and named(first, second) == "a.jsonl or b.jsonl"
    assert named() == named(first | {"dataset": "file_" + "1" * 40}) == ""


def test_a_token_that_had_no_chance_does_not_cost_the_page_of_its_group(tmp_path: Path) -> None:
    completion = item("alpha", "beta", 1.0).scored.group.completions[0]
    absurd = replace(completion, token_ids=pack_ids([1]), behaviour_logprobs=pack_logprobs([float("-inf")]))
    assert "Infinity" not in visible_json(heat(absurd, tmp_path))


def test_the_heat_of_a_token_has_what_the_trainer_used_of_it(tmp_path: Path) -> None:
    made = batch(4, item("alpha", "beta", 1.0, 0.0))
    scored = made.items[0].scored
    with_logprobs = replace(scored.group.completions[0], behaviour_logprobs=pack_logprobs([-0.5, -1.0, -2.0]))
    group = replace(scored.group, completions=[with_logprobs, with_logprobs])
    made = replace(made, items=[replace(made.items[0], scored=replace(scored, group=group))])
    answers = [
        {"place": 0, "advantage": 1.5, "token_ratio": [1.0, 0.5, None], "token_weight": [1.0, 0.5, 1.0]},
        {"place": 1, "advantage": -1.5, "token_ratio": [1.0], "token_weight": [1.0]},
    ]
    told = {"id": scored.group_id, "origin": "foreign", "sender": "beta", "fate": "trained", "answers": answers}
    (tmp_path / TRAINED_FILE).write_text(trained_line(4, 2.0, updated=True, updates=1, groups=[told]) + "\n")
    found = group_object("alpha", made, 0, MODEL, TrainedRecords(tmp_path), JUDGE)
    assert found is not None
    first, second = (completion["heat"] for completion in found["completions"])
    assert first["ratio"] == [1.0, 0.5, None] and first["weight"] == [1.0, 0.5, 1.0]
    assert "ratio" not in second and "weight" not in second, "of another number of tokens: a guess"
    later = group_object("alpha", replace(made, number=5), 0, MODEL, TrainedRecords(tmp_path), JUDGE)
    assert later is not None and later["training"] is None and later["waits"] and not found["waits"]


def test_tokens_have_their_text_only_where_they_make_the_completions() -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode("6 is it").ids
    packed = {"token_ids": pack_ids(ids), "behaviour_logprobs": pack_logprobs([-0.5] * len(ids))}
    right = heat(Completion(text="6 is it", finish_reason="stop", token_count=len(ids), **packed), MODEL)  # type: ignore[arg-type]
    assert right is not None and "".join(right["texts"]) == "6 is it" and right["logprob"] == [-0.5] * len(ids)
    other = heat(Completion(text="something else", finish_reason="stop", token_count=len(ids), **packed), MODEL)  # type: ignore[arg-type]
    assert other is not None and other["texts"] is None
    assert heat(Completion(text="6", finish_reason="stop", token_count=1), MODEL) is None
