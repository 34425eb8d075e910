"""What a NATS connection's errors leave in the log."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from shared.transport.base import Counters
from shared.transport.nats import connection as complaints_module
from shared.transport.nats.connection import MOST_TOLD, Complaints, Options


@pytest.fixture(autouse=True)
def uncached_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that was used under an earlier configuration keeps it, and is not captured."""
    monkeypatch.setattr(complaints_module, "log", structlog.get_logger())


@pytest.fixture
def complaints() -> Complaints:
    return Complaints(Options(url="nats://127.0.0.1:1", name="test"), Counters())


def test_errors_that_take_turns_are_told_once_each_until_there_is_a_connection(complaints: Complaints) -> None:
    with capture_logs() as logs:
        for error in [ConnectionRefusedError("a"), TimeoutError("b")] * 10:
            complaints.hear(error, opening=False)
    assert [line["error"] for line in logs] == ["ConnectionRefusedError: a", "TimeoutError: b"]
    assert complaints._counters.errors["unreachable"] == 20
    complaints.settle()
    with capture_logs() as logs:
        complaints.hear(TimeoutError("b"), opening=False)
    assert [line["error"] for line in logs] == ["TimeoutError: b"]


def test_an_error_that_never_says_the_same_fills_neither_log_nor_memory(complaints: Complaints) -> None:
    with capture_logs() as logs:
        for number in range(10 * MOST_TOLD):
            complaints.hear(OSError(f"number {number}"), opening=False)
    assert len(logs) == MOST_TOLD + 1 and logs[-1]["event"] == "nats_errors_untold"
    assert complaints.newest == f"OSError: number {10 * MOST_TOLD - 1}"
    assert len(complaints._told) <= MOST_TOLD + 1
