"""What the page tells of a node's steps, by the trainer's records, and of the batches of a run that
has ended.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from services.trainer.records import batch_line
from shared.config import load_config
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.streams import ensure_node_streams
from shared.run_records import BATCHES_FILE
from swarm_cli.dashboard.recent_groups import BATCHES_BACK, BatchFollower, RecentGroups, StepPoint
from swarm_cli.dashboard.run_records import RunRecords, lengths_object, steps_object
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.rollouts.records import RecordedBatches
from tests.nats_server import own_plane
from tests.unit.page_batches import NOW, batch, item


async def test_the_batches_of_an_ended_run_are_those_on_record_and_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    made = [batch(number, item("alpha", "beta", number / 10)) for number in (1, 2, 3)]
    again = batch(2, item("alpha", "beta", 0.9))
    (tmp_path / (BATCHES_FILE + ".old")).write_text(batch_line(made[0]) + "\n")
    lines = [batch_line(made[1]), batch_line(made[2]), batch_line(again), '{"step":7,"batch":{', '{"step":8,"batch":{}}']
    (tmp_path / BATCHES_FILE).write_text("\n".join(lines))
    recorded = RecordedBatches(tmp_path, "alpha")
    assert [await recorded.batch_at(step) for step in (1, 2, 3)] == [made[0], again, made[2]]
    assert [each async for each in recorded.back_from(await recorded.last_seq())] == [made[2], again, made[0]]
    records = BatchFollower()
    await records.read_recorded("alpha", recorded)
    assert [point.step for point in records.recent.steps("alpha")] == [1, 2, 3] and records.first_held("alpha") == 1
    for step in (4, 7, 8):
        with pytest.raises(CommandError, match=f"step {step}"):
            await recorded.batch_at(step)
    with pytest.raises(CommandError, match="no batches.jsonl"):
        await RecordedBatches(None, "alpha").batch_at(1)


def test_a_long_batch_is_recorded_without_its_token_ids() -> None:
    long = batch(1, item("alpha", "alpha", 1.0))
    (only,) = long.items[0].scored.group.completions
    ids = structs.replace(only, token_ids=b"\0" * 2**20, behaviour_logprobs=b"\0" * 2**20)
    group = structs.replace(long.items[0].scored.group, completions=[ids])
    scored = structs.replace(long.items[0].scored, group=group)
    line = batch_line(structs.replace(long, items=[structs.replace(long.items[0], scored=scored)]))
    (kept,) = msgspec.json.decode(line)["batch"]["items"][0]["scored"]["group"]["completions"]
    assert len(line) < 10_000 and kept["text"] == only.text and kept.get("token_ids") is None


def test_the_rewards_of_all_steps_are_drawn_from_the_trainers_records(tmp_path: Path) -> None:
    lines = [{"step": n, "time": NOW, "updated": True, "reward_local": n / 10, "reward_external": None} for n in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = RunRecords(load_config(DEMO_CONFIG))
    records.count({"alpha": tmp_path})
    assert records.rewards("beta") == []
    batches = [StepPoint(step, NOW + step, 0.9, None) for step in (3, 4, 5)]
    assert steps_object(records.rewards("alpha"), batches, 3) == [
        [1, NOW, 0.1, None, False, 0],
        [2, NOW, 0.2, None, False, 0],
        [3, NOW + 3, 0.3, None, True, 0],
        [4, NOW + 4, 0.4, None, True, 0],
    ], "step 5 was never taken, and only two of the others have their groups in the log"
    assert [each[0] for each in steps_object([], batches, 3)] == [3, 4, 5], "without records the batches tell"


def test_steps_after_a_change_of_the_reward_are_told_apart_also_those_that_two_rewards_scored(tmp_path: Path) -> None:
    """Steps of which no reward is known yet are no change; null after one was is."""
    scorers = [None, "1" * 64, None, "1" * 64, None, "2" * 64, "2" * 64]
    lines = [
        {"step": n, "time": NOW, "updated": True, "reward_local": 0.5} | ({} if scorer is None else {"scorer": scorer})
        for n, scorer in enumerate(scorers, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = RunRecords(load_config(DEMO_CONFIG))
    records.count({"alpha": tmp_path})
    assert [each[5] for each in steps_object(records.rewards("alpha"), [], 0)] == [0, 0, 1, 2, 3, 4, 4]


def test_lengths_and_each_reward_are_told_of_every_step_since_the_rewards_were_changed(tmp_path: Path) -> None:
    lines = [
        {"step": n, "time": NOW, "scorer": "1" * 64 if n < 3 else "2" * 64, "reward_local": 0.5}
        | {"answer_tokens": 10.0 * n, "cut_off_share": 0.25, "reward_parts": {"accuracy": n / 10, "format": 1.0}}
        for n in range(1, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = RunRecords(load_config(DEMO_CONFIG))
    records.count({"alpha": tmp_path})
    assert lengths_object(records.rewards("alpha"), []) == {
        "lengths": [[1, 10.0, 0.25], [2, 20.0, 0.25], [3, 30.0, 0.25], [4, 40.0, 0.25]],
        "parts": {"accuracy": [[3, 0.3], [4, 0.4]], "format": [[3, 1.0], [4, 1.0]]},
    }


def test_lengths_of_steps_recorded_without_them_are_those_of_the_local_answers_in_their_batches() -> None:
    recorded = [StepPoint(step, NOW, 0.5, None) for step in (1, 2)]
    own, foreign = item("alpha", "alpha", 1.0), item("alpha", "beta", 1.0)
    (said,) = own.scored.group.completions
    twice = [structs.replace(said, token_count=30, finish_reason="length"), structs.replace(said, token_count=10)]
    group = structs.replace(own.scored.group, completions=twice)
    parts = {"accuracy": [1.0, 0.0], "format": [None, 0.5]}
    scored = structs.replace(own.scored, group=group, rewards=[1.0, 0.5], parts=parts)
    read = RecentGroups()
    read.take("alpha", batch(2, structs.replace(own, scored=scored), foreign))
    told = {"lengths": [[2, 20.0, 0.5]], "parts": {"accuracy": [[2, 0.5]], "format": [[2, 0.5]]}}
    assert lengths_object(recorded, read.steps("alpha")) == told


def test_rewards_have_the_digits_that_other_displays_write() -> None:
    """0.0625 lies between two values of three digits; 0.57146 would become 0.572 by way of four."""
    ((_, _, local, foreign, *_),) = steps_object([], [StepPoint(3, NOW, 1.0625, 0.57146)], 3)
    assert (local, foreign) == (float(f"{1.0625:.3f}"), 0.571) == (1.062, 0.571)


async def test_which_steps_the_log_holds_is_told_although_only_its_newest_batches_are_read() -> None:
    plane, records, stream = await own_plane(), BatchFollower(), subjects.node_batches_stream("alpha")
    await ensure_node_streams(plane, "alpha")
    assert records.first_held("alpha") == 0
    for number in range(1, BATCHES_BACK + 9):
        payload = encode(batch(number, item("alpha", "gamma", 1.0)))
        await plane.publish(subjects.node_batches("alpha"), payload, stream=stream, message_id=f"alpha-{number}")
    await records.follow(plane, ["alpha"])
    assert records.first_held("alpha") == 1 and records.recent.steps("alpha")[0].step == 9
    await plane.purge(stream, 5)
    await records.follow(plane, ["alpha"])
    assert records.first_held("alpha") in (5, 6)
