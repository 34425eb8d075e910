"""What the page tells of a node's steps: by the trainer's records, and without the batch that a run
which has ended never took.
"""

from __future__ import annotations

import json
from pathlib import Path

from services.trainer.trained import trained_line
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.streams import ensure_node_streams
from shared.run_records import TRAINED_FILE
from shared.transport.memory.transport import MemoryServer, MemoryTransport
from swarm_cli.dashboard.batch_follower import BATCHES_BACK, BatchFollower
from swarm_cli.dashboard.group_page import step_object
from swarm_cli.dashboard.recent_groups import RecentGroups, StepPoint
from swarm_cli.dashboard.steps import steps_object
from swarm_cli.dashboard.trained_groups import TrainedFollower
from swarm_cli.rollouts.fates import fate_of
from swarm_cli.rollouts.records import TrainedRecords
from tests.unit.page_batches import NOW, batch, item


def test_the_batch_that_an_ended_run_never_took_comes_after_those_that_it_trained_on() -> None:
    recent = RecentGroups()
    for number in (1, 2, 3):
        recent.take("alpha", batch(number, item("alpha", "beta", 1.0)))
    recent.take("beta", batch(1, item("beta", "beta", 1.0)))
    assert [(group.step, group.never) for group in recent.recent(9, "alpha")] == [(3, False), (2, False), (1, False)]
    ended = recent.recent(9, last={"alpha": 2})
    assert [(group.taker, group.step) for group in ended if not group.never] == [("alpha", 2), ("alpha", 1), ("beta", 1)]
    assert [(group.taker, group.step) for group in ended[3:]] == [("alpha", 3)] and ended[3].never
    assert step_object("alpha", batch(3), never=True)["never"] and not step_object("alpha", batch(3))["never"]


def test_a_group_of_that_batch_does_not_wait_any_more(tmp_path: Path) -> None:
    (tmp_path / TRAINED_FILE).write_text(trained_line(2, 2.0, updated=True, updates=1, groups=[]) + "\n")
    records = TrainedRecords(tmp_path)
    waiting, ended = (fate_of(records, 3, "aa" * 32, ended=over) for over in (False, True))
    assert (waiting.yet, waiting.never) == (True, False) and (ended.yet, ended.never) == (False, True)
    assert ended.sentence() == "not trained on: the run ended before its step"
    assert not fate_of(records, 2, "aa" * 32, ended=True).never, "its step was taken"


def test_the_rewards_of_all_steps_are_drawn_from_the_trainers_records(tmp_path: Path) -> None:
    lines = [{"step": n, "time": NOW, "updated": True, "reward_local": n / 10, "reward_external": None} for n in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    follower = TrainedFollower()
    follower.read_on({"alpha": tmp_path})
    assert follower.newest == {"alpha": 4} and follower.rewards("beta") == []
    batches = [StepPoint(step, NOW + step, 0.9, None) for step in (3, 4, 5)]
    assert steps_object(follower.rewards("alpha"), batches, 3) == [
        [1, NOW, 0.1, None, False],
        [2, NOW, 0.2, None, False],
        [3, NOW + 3, 0.3, None, True],
        [4, NOW + 4, 0.4, None, True],
    ], "step 5 was never taken, and only two of the others have their groups in the log"
    assert [each[0] for each in steps_object([], batches, 3)] == [3, 4, 5], "without records the batches tell"


async def test_which_steps_the_log_holds_is_told_although_only_its_newest_batches_are_read() -> None:
    plane, follower, stream = MemoryTransport(MemoryServer()), BatchFollower(), subjects.node_batches_stream("alpha")
    await ensure_node_streams(plane, "alpha")
    assert follower.first_held("alpha") == 0
    for number in range(1, BATCHES_BACK + 9):
        payload = encode(batch(number, item("alpha", "gamma", 1.0)))
        await plane.publish(subjects.node_batches("alpha"), payload, stream=stream, message_id=f"alpha-{number}")
    await follower.follow(plane, ["alpha"])
    assert follower.first_held("alpha") == 1 and follower.recent.steps("alpha")[0].step == 9
    await plane.purge(stream, 5)
    await follower.follow(plane, ["alpha"])
    assert follower.first_held("alpha") in (5, 6)
