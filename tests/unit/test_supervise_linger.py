"""The supervisor's `--linger`: under honcho, which signals whole process groups, the NATS server
stops after the services.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.runtime.supervise import supervise

ROOT = Path(__file__).parents[2]
CHILD = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"


def start(pid_file: Path, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    command = [sys.executable, "-m", "shared.runtime.supervise", *options, "--", sys.executable, "-c", CHILD, str(pid_file)]
    supervisor = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline, "the child did not start"
        time.sleep(0.02)
    return supervisor, int(pid_file.read_text())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_lingering_child_outlives_the_signal_to_the_group_and_then_ends(tmp_path: Path) -> None:
    supervisor, child = start(tmp_path / "pid", "--linger", "1.5")
    signalled = time.monotonic()
    os.killpg(supervisor.pid, signal.SIGTERM)
    time.sleep(0.7)
    assert is_running(child)
    assert supervisor.wait(timeout=180) == 0
    assert 1.4 < time.monotonic() - signalled < 8
    assert not is_running(child)


def test_a_program_that_is_not_there_is_named_with_the_remedy_and_not_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(["nats-server-that-nobody-has", "--port", "1"]) == 78
    said = capfd.readouterr().err
    assert said.startswith("nats-server-that-nobody-has cannot be started (No such file") and "PATH" in said


@pytest.mark.slow
def test_without_it_the_child_ends_at_once(tmp_path: Path) -> None:
    supervisor, child = start(tmp_path / "pid")
    os.killpg(supervisor.pid, signal.SIGTERM)
    assert supervisor.wait(timeout=180) == 0
    assert not is_running(child)
