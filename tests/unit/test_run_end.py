"""How a run ended, as its folder says it, and what commands that go on looking do then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.config import NodeConfig, load_config
from shared.contracts.control import ServiceStatus
from shared.roles import ROLES
from shared.runtime.exits import EXIT_CONFIG, EXIT_UNSAVED
from shared.transport.base import NotConnected
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.observe.node_state import NodeState
from swarm_cli.runs import (
    END,
    EXIT_BROKE_OFF,
    EXIT_ENDED,
    EXIT_KILLED,
    RunGone,
    RunNote,
    StartOptions,
    forget_end,
    newest_ended,
    read_end,
    write_end,
    write_note,
)
from swarm_cli.target import Target, default_target, ended_here, explained, looking_at


def noted(folder: Path, port: int = 21_001) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_note(folder, RunNote(f"nats://127.0.0.1:{port}", f"nats://127.0.0.1:{port}", StartOptions()))
    return folder


@pytest.mark.parametrize(
    ("code", "process", "words", "exit_code"),
    [
        (0, "progress", "ended in order at .*: every node has taken its steps", EXIT_ENDED),
        (130, None, r"ended in order at .*: it was stopped \(Ctrl-C or `swarm down`\)", EXIT_ENDED),
        (143, None, "ended in order", EXIT_ENDED),
        (EXIT_KILLED, None, "was killed at .*: `swarm down --now` ended it", EXIT_BROKE_OFF),
        (0, None, "ended in order at .*: it was stopped", EXIT_ENDED),
        (EXIT_CONFIG, "beta-trainer", "failed at .*: beta-trainer cannot go on", EXIT_BROKE_OFF),
        (EXIT_UNSAVED, "beta-trainer", "failed at .*: beta-trainer could not save its last policy", EXIT_BROKE_OFF),
        (1, "nats", "failed at .*, 0 seconds ago: nats ended with code 1", EXIT_BROKE_OFF),
    ],
)
def test_a_run_s_end_is_told_with_its_cause_and_its_time(
    tmp_path: Path, code: int, process: str | None, words: str, exit_code: int
) -> None:
    folder = noted(tmp_path / "runs" / "one")
    write_end(folder, code, process)
    end = read_end(folder)
    assert end is not None and end.exit_code == exit_code
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(end.sentence("one", end.at))
    for passed_s, ago in ((1.4, "1 second ago"), (2, "2 seconds ago"), (119, "119 seconds ago"), (130, "2 minutes ago")):
        assert f", {ago}: " in end.sentence("one", end.at + passed_s)


def test_a_run_that_says_nothing_of_its_end_was_killed_when_it_last_wrote_something(tmp_path: Path) -> None:
    folder = noted(tmp_path / "runs" / "one")
    write_end(folder, 0, "progress")
    forget_end(folder)  # it goes on
    (folder / "alpha").mkdir()
    for name, at in ((folder / "alpha" / "trainer.log", 5_000), (folder / "up.json", 1_000)):
        name.touch()
        os.utime(name, (at, at))
    with holding_run(folder):
        assert read_end(folder) is None
    end = read_end(folder)
    assert end is not None and (end.how, end.at, end.exit_code) == ("killed", 5_000, EXIT_BROKE_OFF)
    (folder / END).write_text("{torn")
    assert read_end(folder) == end
    assert read_end(tmp_path / "runs" / "none") is None


def test_the_run_that_ended_last_is_found_by_the_server_that_it_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age_s, (run, port) in enumerate([("three", 3), ("two", 2), ("one", 2)]):
        folder = noted(tmp_path / "runs" / run, port)
        monkeypatch.setattr("swarm_cli.runs.time.time", lambda at=5000.0 - age_s: at)
        write_end(folder, 0, "progress")
        started = 1000 + age_s  # what ended first was started last
        os.utime(folder / "up.json", (started, started))
    monkeypatch.undo()

    def newest(url: str = "") -> str:
        found = newest_ended(tmp_path, url)
        return found[0].name if found else ""

    assert (newest(), newest("nats://127.0.0.1:2"), newest("nats://127.0.0.1:9")) == ("three", "two", "")
    with holding_run(tmp_path / "runs" / "two"):
        assert newest("nats://127.0.0.1:2") == "", "a run runs there again"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeConfig:
    monkeypatch.delenv("SWARM_NATS__NODE_URL", raising=False)
    return load_config(DEMO_CONFIG, {"node": {"var_dir": str(tmp_path)}})


def test_the_end_that_explains_a_silent_server_is_that_of_its_own_run(tmp_path: Path, config: NodeConfig) -> None:
    one, two = noted(tmp_path / "runs" / "one", 21_001), noted(tmp_path / "runs" / "two", 21_002)
    with holding_run(one):
        target = default_target(config, "")
        assert target == Target("nats://127.0.0.1:21001", "nats://127.0.0.1:21001", "one")
        assert ended_here(tmp_path, target) is None, "it is running"
        write_end(one, 0, "progress")
    with holding_run(two):
        write_end(two, 78, "alpha-trainer")
    ended = ended_here(tmp_path, target)
    assert ended is not None and ended[0] == one and ended[1].in_order
    assert ended_here(tmp_path, Target("nats://127.0.0.1:21009", None)) is None, "another run's server is no reason"
    away = NotConnected("no server answers")
    gone = explained(tmp_path, target, away)
    assert isinstance(gone, RunGone) and gone.folder == one and gone.ending("swarm top").exit_code == 3
    failed = explained(tmp_path, Target("nats://127.0.0.1:21002", None), away)
    assert isinstance(failed, RunGone) and failed.ending("swarm top").exit_code == 4
    assert explained(tmp_path, Target("nats://127.0.0.1:21009", None), away) is away


def test_a_run_that_is_not_here_is_not_taken_for_the_one_that_runs(tmp_path: Path, config: NodeConfig) -> None:
    one = noted(tmp_path / "runs" / "one", 21_001)
    (tmp_path / "runs" / "records-of-it").mkdir()
    with holding_run(one):
        with pytest.raises(CommandError, match="no run 'oen'"), looking_at(config, "oen", "", only_here=False):
            pass
        with looking_at(config, "records-of-it", "", only_here=False) as target:
            assert target.node_url == "nats://127.0.0.1:21001", "a node whose server is elsewhere leaves records alone"


def test_a_node_whose_processes_all_ended_in_order_has_ended_and_waits_for_none() -> None:
    def node(at: float, **states: str) -> NodeState:
        statuses = [
            ServiceStatus(node="a", role=role, replica="0", pid=1, host="h", state=states.get(role, "stopped"), started_at=0,
                          updated_at=100.0, figures={})
            for role in ROLES
        ]  # fmt: skip
        return NodeState("a", tuple(statuses), at=at)

    assert node(101.0).ended and node(101.0).absent == []
    assert not node(101.0, trainer="training").ended, "the trainer is there"
    assert not node(1_000.0, trainer="training").ended, "it went without a word"
    assert node(1_000.0, trainer="training").absent == ["no word from generator, verifier, sampler, trainer for 15m"]
    assert not NodeState("a", at=101.0).ended
