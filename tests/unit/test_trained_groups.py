"""Who learns from whom is counted from the trainers' records: what was trained on, from the first
step of a run, also after it ended or was continued; and what they do not say is not guessed.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import msgspec

from services.trainer.learner import Learner
from services.trainer.records import MetricsLog, forget_steps_after
from shared.config import load_config
from shared.contracts.messages import Places
from shared.run_records import METRICS_FILE
from swarm_cli.dashboard.run_records import CELLS_A_NODE, NodeTally, RunRecords
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.rollouts.shown import why
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy


def write(folder: Path, *lines: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def step(number: int, *, updated: bool = True, **of: dict[str, int]) -> dict[str, Any]:
    return {"step": number, "updated": updated, "trained_of": of}


def counts(records: RunRecords) -> dict[tuple[str, str, str], int]:
    return {(cell.taker, cell.sender, cell.dataset): cell.groups for cell in records.trained.cells}


def test_candidates_that_the_trainer_leaves_out_and_groups_without_effect_are_not_counted(tmp_path: Path) -> None:
    model = tiny_policy(tmp_path / "model")
    trainer = Learner(node_config(model, tmp_path, trainer={"constants": {"policy_check_fraction": 0.0}}))
    rng, tokenizer = random.Random(3), trainer.tokenizer
    groups = [
        scored_group(tokenizer, rng),
        scored_group(tokenizer, rng, rewards=(1.0, 1.0)),
        scored_group(tokenizer, rng, origin="external", rewards=(1.0, 0.0)),
        scored_group(tokenizer, rng, origin="external", rewards=(1.0, 0.0)),
        msgspec.structs.replace(scored_group(tokenizer, rng), rewards=[], failure="it hung"),
    ]
    batch = msgspec.structs.replace(batch_of(1, groups), places=Places(keep=1, node_cap=9))
    assert why(batch, batch.items[2]).endswith("a candidate for 1 place")
    log = MetricsLog(tmp_path / "first" / "alpha", 0)
    log.append(trainer.step(batch))
    again = batch_of(2, [groups[0], scored_group(tokenizer, rng)])
    items = [msgspec.structs.replace(item, replayed=item.scored.group_id == groups[0].group_id) for item in again.items]
    log.append(trainer.step(msgspec.structs.replace(again, items=items)))
    records = RunRecords(load_config(DEMO_CONFIG))
    records.count({"alpha": tmp_path / "first" / "alpha"})
    dataset = groups[0].group.task.ref.dataset
    local, foreign = groups[0].group.node, groups[2].group.node
    assert counts(records) == {("alpha", local, dataset): 2, ("alpha", foreign, dataset): 1}
    assert (records.trained.since, records.trained.uncounted, records.trained.left_out) == ({}, (), 0)


def test_a_run_that_goes_on_is_counted_from_its_first_step_and_steps_trained_again_count_once(tmp_path: Path) -> None:
    folder = tmp_path / "alpha"
    write(folder, step(1, alpha={"gcd": 2}), step(2, alpha={"gcd": 1}, beta={"sums": 1}))
    records = RunRecords(load_config(DEMO_CONFIG))
    records.count({"alpha": folder})
    assert counts(records) == {("alpha", "alpha", "gcd"): 3, ("alpha", "beta", "sums"): 1}
    forget_steps_after(folder / METRICS_FILE, 1)  # its trainer was killed, and trains step 2 again
    records.count({"alpha": folder})
    assert counts(records) == {("alpha", "alpha", "gcd"): 2}
    write(folder, step(2, beta={"sums": 1}), step(3, beta={"sums": 1}))
    with (folder / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "updated": true, "trained')
    records.count({"alpha": folder})
    assert counts(records) == {("alpha", "alpha", "gcd"): 2, ("alpha", "beta", "sums"): 2}
    with (folder / METRICS_FILE).open("a") as file:
        file.write('_of": {"beta": {"sums": 5}}}\n')
    records.count({"alpha": folder})
    assert counts(records)["alpha", "beta", "sums"] == 7
    assert records.trained.names("beta") and not records.trained.names("gamma")


def test_a_step_that_changed_no_weights_taught_nothing(tmp_path: Path) -> None:
    write(tmp_path, step(1, updated=False, alpha={"gcd": 2}))
    records = RunRecords(load_config(DEMO_CONFIG))
    records.count({"alpha": tmp_path})
    assert counts(records) == {} and records.trained.uncounted == ()


def test_it_says_from_which_step_on_it_counts_and_whose_groups_it_cannot_count(tmp_path: Path) -> None:
    write(tmp_path / "alpha", {"step": 1, "updated": True}, {"step": 2, "updated": True}, step(3, beta={"gcd": 4}))
    write(tmp_path / "beta", {"step": 1, "updated": True})
    write(tmp_path / "gamma", step(51, alpha={"gcd": 1}))
    (tmp_path / "epsilon").mkdir()
    folders = {name: tmp_path / name for name in ("alpha", "beta", "gamma", "epsilon")} | {"delta": None}
    records = RunRecords(load_config(DEMO_CONFIG))
    records.count(folders)
    assert counts(records) == {("alpha", "beta", "gcd"): 4, ("gamma", "alpha", "gcd"): 1}
    assert records.trained.since == {"alpha": 3, "gamma": 51}
    assert set(records.trained.uncounted) == {"beta", "epsilon", "delta"}


def test_what_a_file_holds_that_no_trainer_wrote_is_skipped_and_its_size_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / METRICS_FILE
    many = {f"n{number}": {"gcd": 1} for number in range(CELLS_A_NODE + 7)}
    with file.open("wb") as lines:
        lines.write(b"[" * 100_000 + b'\n{"step": -1, "trained_of": {}}\n\xff\n' + b"x" * 2**24)
        lines.write(b'\n{"step": 1, "updated": true, "trained_of": {"A B": {"gcd": 1}, "beta": {"gcd": 2}}}\n')
        lines.write(json.dumps({"step": 2, "updated": True, "trained_of": many}).encode() + b"\n")
    tally = NodeTally(file)
    assert tally.read_on() and tally.since == 1
    assert tally.counts["beta", "gcd"] == 2 and len(tally.counts) == CELLS_A_NODE and tally.left_out == 8
    file.unlink()
    os.mkfifo(file)
    assert not tally.read_on() and tally.counts == {}
