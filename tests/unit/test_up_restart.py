"""`swarm restart` of a process that does not end when asked: it says at once what it waits for,
wakes a stopped process, and kills one that hangs as soon as somebody asks for that.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_cli.local.control import SOCKET, ask
from tests.unit.supervised import DEADLINE_S, ROOT, end, is_running, noting, pids, until
from tests.unit.test_up_asked import started, swarm

DEAF = "trap '' TERM; while :; do sleep 0.1; done"
"""A process that no SIGTERM ends."""


def restarting(var_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swarm_cli", "restart", *arguments, "--var-dir", str(var_dir)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def up_with(folder: Path, tmp_path: Path, **lines: str) -> subprocess.Popen[bytes]:
    up = started(folder, {name.replace("_", "-"): line for name, line in lines.items()})
    until(lambda: (folder / SOCKET).exists() and all(pids(tmp_path, name) for name in lines), "all start")
    return up


@pytest.mark.slow
def test_a_restart_says_at_once_what_it_waits_for_and_now_from_another_terminal_ends_the_wait(tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / "one"
    up = up_with(folder, tmp_path, alpha_trainer=noting(tmp_path, "alpha_trainer", DEAF))
    waiting = None
    try:
        before = pids(tmp_path, "alpha_trainer")[0]
        waiting = restarting(tmp_path / "var", "alpha-trainer")
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        assert f"waiting for alpha-trainer (process {before}) to save its state and end, at most 180 s" in said
        assert "swarm restart alpha-trainer --now" in said
        until(lambda: "ending (killed after 180 s)" in str(ask(folder, {"do": "states"})["processes"]), "it is being ended")
        log = (folder / "up.log").read_text()
        assert f"alpha-trainer (process {before}) is to start again: it is asked to end within 180 s" in log
        now = swarm(tmp_path / "var", "restart", "alpha-trainer", "--now")
        assert now.returncode == 0, now.stderr
        assert waiting.wait(DEADLINE_S) == 0 and f"was {before}" in waiting.stderr.read()
        until(lambda: len(pids(tmp_path, "alpha_trainer")) == 2, "it is started again, once")
        assert not is_running(before)
        assert "alpha-trainer is killed: you asked for it (--now)" in (folder / "up.log").read_text()
    finally:
        if waiting is not None and waiting.poll() is None:
            waiting.kill()
            waiting.wait()
        up.kill()
        end(up, *pids(tmp_path, "alpha_trainer"))


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_when_the_caller_does_not_want_to_wait(tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / "one"
    up = up_with(folder, tmp_path, alpha_trainer=noting(tmp_path, "alpha_trainer", DEAF))
    try:
        before = pids(tmp_path, "alpha_trainer")[0]
        told = swarm(tmp_path / "var", "restart", "trainer", "--now")
        assert told.returncode == 0 and f"was {before}" in told.stderr, told.stderr
        until(lambda: len(pids(tmp_path, "alpha_trainer")) == 2, "it is started again")
        assert not is_running(before)
    finally:
        up.kill()
        end(up, *pids(tmp_path, "alpha_trainer"))


@pytest.mark.slow
def test_a_stopped_process_wakes_to_save_its_state_and_a_hanging_server_is_killed_with_its_supervisor(tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / "one"
    supervise = f"exec {sys.executable} -m shared.runtime.supervise"
    saves = f"trap 'touch {tmp_path}/saved; exit 0' TERM; while :; do sleep 0.1; done"
    lines = {"alpha_trainer": noting(tmp_path, "alpha_trainer", saves), "nats": noting(tmp_path, "nats", DEAF)}
    as_services = {
        name: f"{supervise} {'--linger 3 ' * (name == 'nats')}-- sh -c {shlex.quote(line)}" for name, line in lines.items()
    }
    up = up_with(folder, tmp_path, **as_services)
    try:
        stopped, hangs = pids(tmp_path, "alpha_trainer")[0], pids(tmp_path, "nats")[0]
        os.kill(stopped, signal.SIGSTOP)
        told = swarm(tmp_path / "var", "restart", "alpha-trainer")
        assert told.returncode == 0, told.stderr
        until(lambda: len(pids(tmp_path, "alpha_trainer")) == 2, "it is started again")
        assert (tmp_path / "saved").exists() and "is killed" not in (folder / "up.log").read_text()
        os.kill(hangs, signal.SIGSTOP)
        told = swarm(tmp_path / "var", "restart", "nats", "--now")
        assert told.returncode == 0, told.stderr
        until(lambda: len(pids(tmp_path, "nats")) == 2, "the server is started again")
        until(lambda: not is_running(hangs), "the one that hung is gone, and with it its port is free")
    finally:
        up.kill()
        end(up, *(pid for name in lines for pid in pids(tmp_path, name)))
