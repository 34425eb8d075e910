"""An exported policy says what it is, in files that others can read."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from services.trainer.checkpoint import WEIGHTS, CheckpointError, CheckpointStore, TrainedModel, evaluation_measure
from services.trainer.export import CARD, UNCHANGED, export_policy, model_card
from shared.model.weights import trainable_tensors
from shared.run_records import CHECKPOINTS, eval_report
from tests.engines.tiny_models import random_policy, write_model_folder
from tests.unit.test_export_architectures import trained


@pytest.mark.slow
def test_an_export_has_a_card_with_base_steps_and_held_out_scores_and_usual_modes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = random_policy(0, tied=False)
    base = write_model_folder(tmp_path / "little", model)
    node = trained(tmp_path / "monday" / "alpha", base, trainable_tensors(model))
    scores = ({"policy_version": 0, "n": 8, "pass_rate": 0.125}, {"policy_version": 1, "n": 8, "pass_rate": 0.5})
    per_task = ({"gcd": {"pass_rate": 0.25}}, {"gcd": {"pass_rate": 0.75}})
    answers = [[[float(place < right), place < right] for place in range(8)] for right in (1, 4)]
    found = zip(scores, per_task, answers, strict=True)
    lines = [json.dumps({**score, "per_task": by_task, "answers": each}) for score, by_task, each in found]
    (node / "eval.jsonl").write_text("\n".join(lines) + "\n")
    steps = [{"step": 1, "groups_local": 3, "groups_external": 2}, {"step": 2, "groups_local": 9, "groups_external": 0}]
    trained_of = {"alpha": {"gcd": 2}, "beta": {"gcd": 1, "lcm": 1}}
    (node / "metrics.jsonl").write_text("".join(json.dumps({**step, "trained_of": trained_of}) + "\n" for step in steps))
    capfd.readouterr()
    (node / "files.jsonl").write_text('{"dataset": "gcd", "file": "sums.jsonl"}\n')
    out = export_policy(node, tmp_path / "out", system_prompt="Be brief | 1").folder
    assert "shards" not in "".join(capfd.readouterr()), "no bars meant for people who save models by hand"
    card = (out / CARD).read_text()
    assert "the folder `little`" in card and str(tmp_path) not in card
    assert "The same questions, version 0 against version 1: 3 newly right, 0 lost (p 0.25)." in card
    assert "| steps | 1 |" in card and "| run | monday, node alpha |" in card
    assert "| all | 0.125 | 0.500 |" in card and "| sums.jsonl (gcd) | 0.250 | 0.750 |" in card
    assert "| asked with the system prompt | Be brief \\| 1 |" in card
    assert "| 3 of its own, 2 of other nodes |" in card, "what came after the checkpoint does not count"
    assert "| trained on | 4 of these groups" in card
    assert "0.022 to 0.471, then 0.215 to 0.785" in card
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o644}
    assert stat.S_IMODE(out.stat().st_mode) == 0o755


@pytest.mark.slow
def test_a_set_that_only_the_base_policy_was_asked_has_no_figure_of_the_trained_one(tmp_path: Path) -> None:
    model = random_policy(0, tied=False)
    base = write_model_folder(tmp_path / "little", model)
    node = trained(tmp_path / "monday" / "alpha", base, trainable_tensors(model))
    line = {"set": "t", "policy_version": 0, "n": 8, "pass_rate": 0.25, "k": 4, "questions": 2, "pass_at": {"4": 0.5}}
    (node / "eval_sets.jsonl").write_text(json.dumps(line) + "\n")
    card = (export_policy(node, tmp_path / "out").folder / CARD).read_text().splitlines()
    of_set = [row.split(" | ")[1:] for row in card if row.startswith("| t, ")]
    assert of_set == [["0.250", "–", "not measured |"], ["0.500", "–", "not measured |"]]


@pytest.mark.slow
def test_an_export_tells_its_step_a_broken_newer_checkpoint_another_node_and_a_better_base(tmp_path: Path) -> None:
    model = random_policy(0, tied=False)
    base = write_model_folder(tmp_path / "little", model)
    node = trained(tmp_path / "monday" / "alpha", base, trainable_tensors(model))
    assert (whole := export_policy(node, tmp_path / "whole")).notes == () and whole.step == 1
    store = CheckpointStore(node / CHECKPOINTS, keep=3, keep_best=True, owner="monday/beta")
    (first, _) = store.newest()
    assert first is not None
    for step in (2, 3):
        store.save(first.state, replace(first.position, batch_number=step), first.model)
    weights = store.path(3) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    exported = export_policy(node, tmp_path / "older")
    broken, foreign = exported.notes
    assert exported.step == 2 and "step-00000003" in broken and WEIGHTS in broken
    assert "monday/beta" in foreign and "| run | monday, node beta |" in (exported.folder / CARD).read_text()
    line = {"policy_version": 0, "n": 8, "pass_rate": 0.5, "held_out": "a" * 64, "scorer": "b" * 64, "pass_rule": "c" * 64}
    (node / "eval.jsonl").write_text(json.dumps(line) + "\n")
    report = eval_report("alpha", line)
    assert report is not None
    assert store.note_evaluation(2, 0.25, tolerance=0, measure=evaluation_measure(report))
    best = export_policy(node, tmp_path / "best", best=True)
    assert best.step == 2 and "0.500" in best.notes[-1] and "0.250" in best.notes[-1]
    assert store.note_evaluation(2, 0.75, tolerance=0, measure=evaluation_measure(report))
    assert len(export_policy(node, tmp_path / "better", best=True).notes) == 1


@pytest.mark.slow
def test_the_last_evaluation_which_comes_after_the_trainer_has_ended_counts_for_the_best(tmp_path: Path) -> None:
    model = random_policy(0, tied=False)
    node = trained(tmp_path / "monday" / "alpha", write_model_folder(tmp_path / "little", model), trainable_tensors(model))
    unjudged = export_policy(node, tmp_path / "none", best=True)
    assert unjudged.step == 1 and f"swarm eval {node}" in unjudged.notes[-1], "nothing was evaluated, so the newest is written"
    measure = {"held_out": "a" * 64, "scorer": "b" * 64, "pass_rule": "c" * 64}
    lines = [
        {"policy_version": version, "n": 8, "pass_rate": rate, **measure} for version, rate in ((0, 0.25), (1, 0.5), (7, 0.75))
    ]
    (node / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert export_policy(node, tmp_path / "best", best=True).step == 1, "version 7 has no checkpoint"


def test_a_best_checkpoint_that_is_gone_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / CHECKPOINTS, keep=3, keep_best=True)
    for step in (10, 20):
        (tmp_path / CHECKPOINTS / f"step-{step}").mkdir(parents=True)
    assert store.note_evaluation(10, 0.5, tolerance=5)
    (tmp_path / CHECKPOINTS / "step-10").rmdir()
    for there in ("steps 20", "there is none"):
        with pytest.raises(CheckpointError, match=f"step 10, .*{there}.*without --best"):
            export_policy(tmp_path, tmp_path / "out", best=True)
        if there == "steps 20":
            (tmp_path / CHECKPOINTS / "step-20").rmdir()
    assert not (tmp_path / "out").exists()


def test_a_base_of_the_hub_is_named_with_its_commit_and_a_run_without_evaluations_says_so() -> None:
    model = TrainedModel(
        model_path="some/model",
        dtype="bfloat16",
        lora_rank=8,
        lora_alpha=16.0,
        lora_target_modules="all-linear",
        model_revision="a" * 40,
    )
    card = model_card(model, 7, evaluations=[], steps=[], origin="run, node alpha", dtype="float32", adapter=True)
    assert card.startswith("---\nlibrary_name: peft\nbase_model: some/model\n")
    assert f"some/model at commit {'a' * 40}" in card
    assert "No held-out evaluation" in card


def test_a_card_of_a_policy_that_was_not_evaluated_says_so_beside_the_base_s_score() -> None:
    model = TrainedModel(model_path="some/model", dtype="bfloat16", lora_rank=0, lora_alpha=16.0, lora_target_modules="all-linear")

    def card_after(*versions: int) -> str:
        lines = [{"policy_version": version, "n": 8, "pass_rate": 0.125 * (version + 1)} for version in versions]
        reports = [report for line in lines if (report := eval_report("alpha", line))]
        return model_card(model, 7, evaluations=reports, steps=[], origin="run, node alpha", dtype="float32", adapter=False)

    assert "| task | version 0 (base) | version 7 (this) |" in card_after(0) and "| all | 0.125 | not evaluated |" in card_after(0)
    assert "| version 5 |" in card_after(0, 5) and "version 7, was not evaluated" in card_after(0, 5)
    assert "not evaluated" not in card_after(0, 7)


def test_a_card_shows_no_base_score_by_another_reward_and_says_so() -> None:
    model = TrainedModel(model_path="some/model", dtype="bfloat16", lora_rank=0, lora_alpha=16.0, lora_target_modules="all-linear")
    one = {"n": 8, "pass_rate": 0.05, "held_out": "a" * 64, "scorer": "b" * 64}
    lines = [{**one, "policy_version": 0}, {**one, "policy_version": 5, "pass_rate": 0.5, "scorer": "c" * 64}]
    reports = [report for line in lines if (report := eval_report("alpha", line))]
    card = model_card(model, 7, evaluations=reports, steps=[], origin="run, node alpha", dtype="float32", adapter=False)
    assert "0.500" in card and "0.050" not in card and "another reward" in card
    steps = [{"step": step, "scorer": ("d" if step < 4 else "e") * 64, "groups_local": 2} for step in range(1, 8)]
    card = model_card(model, 7, evaluations=reports, steps=steps, origin="run, node alpha", dtype="float32", adapter=False)
    assert "| reward | changed before step 4" in card


@pytest.mark.slow
def test_a_policy_whose_steps_changed_no_weights_is_called_the_base_s_by_card_and_export(tmp_path: Path) -> None:
    model = random_policy(0, tied=False)
    node = trained(tmp_path / "monday" / "alpha", write_model_folder(tmp_path / "little", model), trainable_tensors(model))
    for name, updated in (("same", False), ("moved", True)):
        (node / "metrics.jsonl").write_text(json.dumps({"step": 1, "groups_local": 3, "updated": updated}) + "\n")
        exported = export_policy(node, tmp_path / name)
        card = (exported.folder / CARD).read_text()
        assert ("| 3 of its own" in card) == updated
        assert (UNCHANGED in card) == (UNCHANGED in exported.notes) == (not updated)
