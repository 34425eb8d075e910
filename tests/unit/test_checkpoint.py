"""Checkpoints: whole or not there, checked byte by byte, the newest few and the best kept."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from services.trainer.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    WEIGHTS,
    CheckpointError,
    CheckpointStore,
    LearnerState,
    Misplaced,
    PolicyVersion,
    TrainedModel,
)

MODEL = TrainedModel(model_path="models/base", dtype="float32", lora_rank=0, lora_alpha=16.0, lora_target_modules="all-linear")


def state(step: int, size: int = 100) -> LearnerState:
    weights = {"w": torch.full((size,), float(step)), "half": torch.ones(3, dtype=torch.bfloat16) * step}
    optimizer = {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.rand(size)}}, "param_groups": [{"lr": 0.1}]}
    return LearnerState(weights, optimizer, {"cpu": torch.get_rng_state()})


def position(step: int) -> PolicyVersion:
    return PolicyVersion(batch_number=step, stream_seq=10 * step, consumed_local=4 * step)


def saved(folder: Path, *steps: int, keep: int = 2, keep_best: bool = True) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep, keep_best=keep_best)
    for step in steps:
        store.save(state(step), position(step), MODEL)
    return store


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, keep_best=False)
    written = state(7)
    store.save(written, position(7), MODEL)
    checkpoint, reasons = store.newest()
    assert checkpoint is not None and reasons == []
    assert checkpoint.position == position(7) and checkpoint.model == MODEL
    assert all(torch.equal(checkpoint.state.weights[name], value) for name, value in written.weights.items())
    assert torch.equal(checkpoint.state.optimizer["state"][0]["exp_avg"], written.optimizer["state"][0]["exp_avg"])
    assert torch.equal(checkpoint.state.random["cpu"], written.random["cpu"])


def test_there_is_no_checkpoint_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", keep=1, keep_best=True).newest() == (None, [])


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, MANIFEST])
@pytest.mark.parametrize("damage", ["truncated", "altered", "empty", "missing"])
def test_any_damage_is_noticed_and_the_one_before_is_used(tmp_path: Path, name: str, damage: str) -> None:
    store = saved(tmp_path, 1, 2)
    file = tmp_path / "step-00000002" / name
    payload = file.read_bytes()
    middle = len(payload) // 2
    damaged = {
        "truncated": payload[:-7],
        "altered": payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :],
        "empty": b"",
    }
    file.unlink() if damage == "missing" else file.write_bytes(damaged[damage])
    checkpoint, reasons = store.newest()
    assert checkpoint is not None and checkpoint.position == position(1)
    assert len(reasons) == 1 and "step-00000002" in reasons[0]
    store.set_aside(newer_than=1)
    assert store.steps() == [1] and (tmp_path / "corrupt-step-00000002").is_dir()


def test_when_none_is_whole_the_error_names_each_cause_and_the_remedy(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}" / WEIGHTS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="step-00000002: weights.* torn.*step-00000001.*restore one from a copy"):
        store.newest()


def test_a_half_written_checkpoint_is_never_read_and_swept_at_the_next_save(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    unfinished = tmp_path / ".unfinished-99-2"
    unfinished.mkdir()
    (unfinished / WEIGHTS).write_bytes(b"half")
    assert store.steps() == [1]
    store.save(state(2), position(2), MODEL)
    assert not unfinished.exists() and store.steps() == [1, 2]


def test_a_full_disk_raises_and_leaves_what_was_there(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError):
            store.save(state(2, size=10_000), position(2), MODEL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["step-00000001"]
    checkpoint, _ = store.newest()
    assert checkpoint is not None and checkpoint.position == position(1)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    store.save(state(3, size=7), position(3), MODEL)
    checkpoint, _ = store.newest()
    assert checkpoint is not None and checkpoint.state.weights["w"].shape == (7,)


def test_the_newest_few_are_kept_and_the_best_besides(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20, 30)
    assert store.note_evaluation(12, 0.6, tolerance=10)
    store.prune()
    assert store.steps() == [10, 20, 30]
    store.save(state(40), position(40), MODEL)
    store.prune()
    assert store.steps() == [10, 30, 40]
    assert not store.note_evaluation(40, 0.6, tolerance=10), "equal is not better"
    assert store.note_evaluation(40, 0.7, tolerance=10)
    store.prune()
    assert store.steps() == [30, 40]
    without = CheckpointStore(tmp_path, keep=1, keep_best=False)
    without.prune()
    assert without.steps() == [40]


def test_the_best_by_another_measure_is_replaced_however_high_it_was(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20)
    assert store.note_evaluation(10, 5.9, tolerance=5, measure="one reward")
    assert store.note_evaluation(20, 0.2, tolerance=5, measure="another")
    best = store.best()
    assert best is not None and (best.step, best.measure) == (20, "another")


def test_an_evaluation_far_from_every_checkpoint_marks_none(tmp_path: Path) -> None:
    store = saved(tmp_path, 10)
    assert not store.note_evaluation(25, 0.9, tolerance=10) and store.best() is None


def test_batches_are_needed_from_the_oldest_of_the_newest_few_on(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3)
    store.note_evaluation(1, 0.9, tolerance=0)
    store.prune()
    assert store.steps() == [1, 2, 3] and store.replay_seq() == 20
    (tmp_path / "step-00000002" / MANIFEST).write_text("torn")
    assert store.replay_seq() == 0
    assert CheckpointStore(tmp_path / "none", keep=1, keep_best=True).replay_seq() == 0


def test_the_base_policys_evaluation_marks_no_checkpoint_and_one_that_is_gone_is_no_best(tmp_path: Path) -> None:
    store = saved(tmp_path, 6, keep=3)
    assert not store.note_evaluation(0, 0.9, tolerance=10) and store.best() is None
    assert store.note_evaluation(6, 0.1, tolerance=10)
    (tmp_path / "step-00000006").rename(tmp_path / "elsewhere")
    store.save(state(7), position(7), MODEL)
    assert store.note_evaluation(7, 0.05, tolerance=0), "the checkpoint of the better one is gone"
    best = store.best()
    assert best is not None and (best.step, best.policy_version) == (7, 7)


def test_a_checkpoint_of_another_node_or_step_is_refused_and_left_where_it_is(tmp_path: Path) -> None:
    of = {name: CheckpointStore(tmp_path / name, keep=3, keep_best=False, owner=f"r1/{name}") for name in ("alpha", "beta")}
    for name, steps in (("alpha", (10, 12)), ("beta", (12,))):
        for step in steps:
            of[name].save(state(step), position(step), MODEL)
    found, _ = of["alpha"].newest()
    assert found is not None and found.made_by == "r1/alpha"
    shutil.rmtree(of["alpha"].path(12))
    of["beta"].path(12).rename(of["alpha"].path(12))
    with pytest.raises(Misplaced, match="r1/beta"):
        of["alpha"].newest()
    anybody, _ = CheckpointStore(tmp_path / "alpha", keep=3, keep_best=False).newest()
    assert anybody is not None and anybody.made_by == "r1/beta", "an export takes it, and says whose it is"
    of["alpha"].path(12).rename(of["alpha"].path(99))
    for owner in ("", "r1/beta"):
        with pytest.raises(Misplaced, match="step 12"):
            CheckpointStore(tmp_path / "alpha", keep=3, keep_best=False, owner=owner).newest()
    assert of["alpha"].steps() == [10, 99]
