"""Failed writes are tried again ever more rarely and told once."""

from __future__ import annotations

import errno
import io
import time
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry
from rich.console import Console
from structlog.testing import capture_logs

from shared.contracts.status_figures import FigureFamily
from shared.runtime.status import StatusBoard
from shared.runtime.writes import FIRST_WAIT_S, LONGEST_WAIT_S, Writes
from shared.transport.base import NotConnected, TransportError
from swarm_cli.dashboard.page_state import swarm_object
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.observe.node_lines import findings
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.observe.status import as_object, show


class Trainer:
    """The writes of a trainer, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.registry, self.board = CollectorRegistry(), StatusBoard("alpha", "trainer", "0")
        log = structlog.get_logger("trainer")
        self.writes = Writes("trainer", self.registry, self.board, log, clock=lambda: self.now)

    def write(self, error: Exception | None = None, kind: str = "checkpoint") -> None:
        with self.writes.trying(kind, "free space", OSError, TransportError):
            if error is not None:
                raise error

    def value(self, name: str, kind: str = "checkpoint") -> float | None:
        return self.registry.get_sample_value(f"swarm_trainer_{name}", {"kind": kind})


def full(path: str = "step-7") -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", path)


def test_six_minutes_of_a_full_disk_are_a_few_tries_and_one_line() -> None:
    trainer = Trainer()
    tries = 0
    with capture_logs() as said:
        for step in range(720):  # a step every half second
            if trainer.writes.due("checkpoint"):
                trainer.write(full(f"step-{step}"))
                tries += 1
            trainer.now += 0.5
    # After 0, 1, 3, 7, 15 and 31 s, and then every half minute.
    assert tries == 6 + int((360 - 31) / LONGEST_WAIT_S)
    assert [(line["event"], line["kind"], line["failures"]) for line in said] == [("write_failed", "checkpoint", 1)]
    assert trainer.value("write_failures_total") == tries and trainer.value("write_failing") == 1.0
    assert trainer.board.get(FigureFamily.WRITE_FAILURES.of("checkpoint")) == tries
    assert trainer.board.get(FigureFamily.FAILING_SINCE.of("checkpoint")) == pytest.approx(time.time() - 360, abs=40.0)


def test_another_cause_is_another_line_and_a_success_ends_it_with_a_count() -> None:
    trainer = Trainer()
    with capture_logs() as said:
        trainer.write(full())
        trainer.write(PermissionError(errno.EACCES, "Permission denied"))
        trainer.write(PermissionError(errno.EACCES, "Permission denied"))
        trainer.now += 9.0
        trainer.write()
        trainer.write()
    assert [(line["event"], line["failures"]) for line in said] == [
        ("write_failed", 1),
        ("write_failed", 2),
        ("write_succeeded", 3),
    ]
    assert said[-1]["failing_s"] == 9.0
    assert trainer.value("write_failing") == 0.0 and trainer.value("write_failures_total") == 3.0
    assert not trainer.writes.failing("checkpoint") and trainer.writes.due("checkpoint")
    assert str(FigureFamily.FAILING_SINCE.of("checkpoint")) not in trainer.board.snapshot().figures
    trainer.write(full())  # waits as after a first failure
    trainer.now += FIRST_WAIT_S
    assert trainer.writes.due("checkpoint")


def test_numbers_in_a_message_make_no_new_cause() -> None:
    trainer = Trainer()
    with capture_logs() as said:
        for version in range(5):
            trainer.write(TransportError(f"policy {version} is refused"), "policy")
        trainer.write(TransportError("the stream is gone"), "policy")
    assert [line["reason"] for line in said] == ["policy 0 is refused", "the stream is gone"]


def test_a_server_that_is_away_is_tried_again_at_once_and_kinds_wait_alone() -> None:
    trainer = Trainer()
    for _ in range(9):
        trainer.write(NotConnected("no server"), "policy")
    assert trainer.writes.due("policy") and trainer.writes.failing("policy")
    trainer.write(full())
    assert not trainer.writes.due("checkpoint") and trainer.writes.due("metrics")


def test_what_is_no_failure_of_the_write_is_not_swallowed() -> None:
    trainer = Trainer()
    with pytest.raises(KeyError):
        trainer.write(KeyError("a mistake"))
    assert not trainer.writes.failing("checkpoint")


def shown(board: StatusBoard) -> str:
    text = io.StringIO()
    node = NodeState("alpha", (board.snapshot(),), at=time.time())
    show(SwarmState(node.at, (node,)), Console(file=text, width=300))
    return text.getvalue()


def test_status_names_what_cannot_be_written() -> None:
    trainer: Any = Trainer()
    assert "cannot write" not in shown(trainer.board)
    trainer.write(full())
    trainer.now += 180.0
    trainer.write(full())
    said = shown(trainer.board)
    assert "alpha: the trainer cannot write: checkpoint, for 3m" in said and "(2 failed writes)" in said
    state = NodeState("alpha", (trainer.board.snapshot(),), at=time.time())
    swarm = SwarmState(state.at, (state,))
    assert state.health == "warn" and state.unwritten in findings(state)
    assert state.unwritten in as_object(swarm)["nodes"]["alpha"]["trouble"]
    (page,) = swarm_object(swarm, RecentGroups())["nodes"]
    assert "cannot write: checkpoint, for 3m" in page["notes"][0]
    trainer.write()
    assert "cannot write" not in shown(trainer.board)
