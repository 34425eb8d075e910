"""`swarm up` as a process among others: a pipe's reader that ends, a terminal that closes, a
service that is killed, a view that fails, a process that does not end, a parent that is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from shared.runtime.exits import EXIT_UNSAVED
from swarm_cli.local.supervisor import ECHO_S, Signals
from tests.unit.supervised import DEADLINE_S, ROOT, RUN, end, is_running, noting, pids, supervised, ticking, until

pytestmark = pytest.mark.slow


def waiting_bytes(process: subprocess.Popen[bytes]) -> int:
    """Return what it has written and nobody has read."""
    assert process.stdout is not None
    (waiting,) = struct.unpack("i", fcntl.ioctl(process.stdout, termios.FIONREAD, b"\0" * 4))
    return int(waiting)


def test_a_reader_that_ends_does_not_make_it_deaf_to_sigterm(tmp_path: Path) -> None:
    up = supervised({"alpha-trainer": noting(tmp_path, "a", ticking(tmp_path))}, stdout=subprocess.PIPE)
    assert up.stdout is not None
    try:
        assert up.stdout.readline()
        up.stdout.close()  # as `| head -1` does
        seen = len(pids(tmp_path, "tick"))
        until(lambda: len(pids(tmp_path, "tick")) > seen + 5, "several lines have met the closed pipe")
        assert up.poll() is None, "a reader that ends is no reason for the swarm to end"
        up.send_signal(signal.SIGTERM)
        assert up.wait(DEADLINE_S) == 143
        assert not is_running(pids(tmp_path, "a")[0])
    finally:
        end(up, *pids(tmp_path, "a"))


def test_a_reader_that_pauses_does_not_make_it_deaf_to_ctrl_c(tmp_path: Path) -> None:
    flood = noting(tmp_path, "a", "yes 'a line that is not read'")
    up = supervised({"alpha-trainer": flood}, stdout=subprocess.PIPE)
    assert up.stdout is not None
    try:
        until(lambda: pids(tmp_path, "a"), "the process starts")
        until(lambda: waiting_bytes(up) > 60_000, "the pipe is full")
        up.send_signal(signal.SIGINT)
        assert up.wait(DEADLINE_S) == 130
        assert not is_running(pids(tmp_path, "a")[0])
    finally:
        end(up, *pids(tmp_path, "a"))


def test_a_terminal_that_closes_ends_nothing_and_leaves_the_log(tmp_path: Path) -> None:
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    options = f'{{"log_file": "{tmp_path}/up.log"}}'
    lines = f'{{"alpha-trainer": "{noting(tmp_path, "a", ticking(tmp_path))}"}}'
    command = [sys.executable, "-c", RUN, lines, options]
    up = subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal)
    os.close(slave)
    try:
        until(lambda: pids(tmp_path, "a"), "the process starts")
        os.close(master)  # SIGHUP, and EIO for who writes
        until(lambda: "the terminal was closed" in (tmp_path / "up.log").read_text(), "the end of the terminal is noted")
        ticks = (tmp_path / "up.log").read_text().count("tick")
        until(lambda: (tmp_path / "up.log").read_text().count("tick") > ticks, "the swarm runs on")
        up.send_signal(signal.SIGTERM)
        assert up.wait(DEADLINE_S) == 143
        assert not is_running(pids(tmp_path, "a")[0])
    finally:
        end(up, *pids(tmp_path, "a"))


def test_ctrl_c_ends_it_and_the_tee_that_it_is_piped_into(tmp_path: Path) -> None:
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    lines = json.dumps({"alpha-trainer": noting(tmp_path, "a", ticking(tmp_path))})
    up = shlex.join([sys.executable, "-c", RUN, lines, "{}"])
    command = ["sh", "-c", f"{up} | tee {tmp_path}/log"]
    piped = subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal)
    os.close(slave)
    try:
        until(lambda: len(pids(tmp_path, "tick")) > 3, "the process ticks")
        os.write(master, b"\x03")  # the terminal tells the whole foreground: tee ends at once
        piped.wait(DEADLINE_S)
        until(lambda: not is_running(pids(tmp_path, "a")[0]), "the process has ended")
    finally:
        os.close(master)
        end(piped, *pids(tmp_path, "a"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_that_is_killed_is_started_again_and_ends_nobody(tmp_path: Path, number: signal.Signals) -> None:
    lines = {"alpha-trainer": noting(tmp_path, "a"), "beta-trainer": noting(tmp_path, "b")}
    up = supervised(lines)
    try:
        until(lambda: pids(tmp_path, "a") and pids(tmp_path, "b"), "both start")
        os.kill(pids(tmp_path, "a")[0], number)
        until(lambda: len(pids(tmp_path, "a")) == 2, "it is started again")
        assert is_running(pids(tmp_path, "b")[0]) and len(pids(tmp_path, "b")) == 1
        up.send_signal(signal.SIGINT)
        assert up.wait(DEADLINE_S) == 130
    finally:
        end(up, *pids(tmp_path, "a"), *pids(tmp_path, "b"))


def test_a_view_that_fails_is_started_again_and_one_that_is_done_ends_the_run(tmp_path: Path) -> None:
    fails_once = f"if [ -e {tmp_path}/once ]; then exit 0; fi; touch {tmp_path}/once; exit 1"
    up = supervised({"alpha-trainer": noting(tmp_path, "a"), "progress": fails_once})
    try:
        assert up.wait(DEADLINE_S) == 0
        assert len(pids(tmp_path, "a")) == 1
        assert not is_running(pids(tmp_path, "a")[0])
    finally:
        end(up, *pids(tmp_path, "a"))


def test_a_service_that_cannot_go_on_says_so_and_leaves_the_others_until_no_node_is_whole(tmp_path: Path) -> None:
    may_end = f"while [ ! -e {tmp_path}/end ]; do sleep 0.05; done; exit 78"
    lines = {"alpha-trainer": "echo no model there; exit 78", "beta-trainer": noting(tmp_path, "b", may_end)}
    log = tmp_path / "up.log"
    up = supervised(lines, ends_by_steps=False, log_file=str(log))
    try:
        until(lambda: log.exists() and "alpha-trainer cannot go on" in log.read_text(), "it is told")
        assert "no model there" in log.read_text() and "swarm restart alpha-trainer" in log.read_text()
        until(lambda: pids(tmp_path, "b"), "the other node runs on")
        assert up.poll() is None
        (tmp_path / "end").touch()
        assert up.wait(DEADLINE_S) == 78
    finally:
        end(up, *pids(tmp_path, "b"))


@pytest.mark.parametrize("ends", ["all steps are taken", "it is stopped"])
def test_a_trainer_that_cannot_save_its_last_policy_is_how_the_run_ends(tmp_path: Path, ends: str) -> None:
    unsaving = noting(tmp_path, "a", f"trap 'exit {EXIT_UNSAVED}' TERM; while :; do sleep 0.05; done")
    view = f"while [ ! -e {tmp_path}/done ]; do sleep 0.05; done"
    up = supervised({"alpha-trainer": unsaving, "beta-trainer": noting(tmp_path, "b"), "progress": view})
    try:
        until(lambda: pids(tmp_path, "a") and pids(tmp_path, "b"), "both start")
        os.kill(pids(tmp_path, "a")[0], signal.SIGTERM)
        until(lambda: len(pids(tmp_path, "a")) == 2, "one that ends so unasked is started again")
        if ends == "it is stopped":
            up.send_signal(signal.SIGTERM)
        else:
            (tmp_path / "done").touch()
        assert up.wait(DEADLINE_S) == EXIT_UNSAVED
    finally:
        end(up, *pids(tmp_path, "a"), *pids(tmp_path, "b"))


def test_one_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = "trap '' TERM; " + noting(tmp_path, "a", "while :; do sleep 0.1; done")
    up = supervised({"alpha-trainer": deaf}, grace_s=1.0)
    try:
        until(lambda: pids(tmp_path, "a"), "it starts")
        up.send_signal(signal.SIGINT)
        assert up.wait(DEADLINE_S) == 130
        assert not is_running(pids(tmp_path, "a")[0])
    finally:
        end(up, *pids(tmp_path, "a"))


def test_a_second_ctrl_c_kills_at_once_what_would_take_its_time(tmp_path: Path) -> None:
    deaf = "trap '' TERM; " + noting(tmp_path, "a", "while :; do sleep 0.1; done")
    log = tmp_path / "up.log"
    up = supervised({"alpha-trainer": deaf}, grace_s=1000.0, log_file=str(log))
    try:
        until(lambda: pids(tmp_path, "a"), "it starts")
        up.send_signal(signal.SIGINT)
        until(lambda: "ending every process" in log.read_text(), "it ends")
        time.sleep(ECHO_S)  # or it would be one key press
        up.send_signal(signal.SIGINT)
        assert up.wait(DEADLINE_S) == 130
        assert not is_running(pids(tmp_path, "a")[0])
    finally:
        end(up, *pids(tmp_path, "a"))


def test_a_signal_that_timeout_sends_twice_leaves_a_process_its_time(tmp_path: Path) -> None:
    """`timeout` signals its command and then the whole process group, which the command is in."""
    last = f"echo written > {tmp_path}/state; exit 0"
    slow = f"trap 'sleep 1; {last}' TERM; " + noting(tmp_path, "a", "while :; do sleep 0.1; done")
    log = tmp_path / "up.log"
    up = supervised({"alpha-trainer": slow}, grace_s=1000.0, log_file=str(log))
    try:
        until(lambda: pids(tmp_path, "a"), "it starts")
        up.send_signal(signal.SIGTERM)
        up.send_signal(signal.SIGTERM)
        until(lambda: "ending every process" in log.read_text(), "it ends")
        os.killpg(up.pid, signal.SIGTERM)
        assert up.wait(DEADLINE_S) == 143
        assert (tmp_path / "state").read_text() == "written\n" and "a second time" not in log.read_text()
    finally:
        end(up, *pids(tmp_path, "a"))


def test_the_same_signal_later_or_another_one_asks_again() -> None:
    signals = Signals()
    assert not signals.is_echo(signal.SIGTERM, 5.0)
    assert signals.is_echo(signal.SIGTERM, 5.0 + ECHO_S / 2)
    assert not signals.is_echo(signal.SIGINT, 5.0 + ECHO_S / 2)
    assert not signals.is_echo(signal.SIGTERM, 5.0 + ECHO_S)


def test_when_it_is_killed_services_and_their_supervisors_end_by_themselves(tmp_path: Path) -> None:
    service = f"exec {sys.executable} -m shared.runtime.supervise -- sh -c '{noting(tmp_path, 'a')}'"
    lingering = f"exec {sys.executable} -m shared.runtime.supervise --linger 1 -- sh -c '{noting(tmp_path, 'n')}'"
    up = supervised({"nats": lingering, "alpha-trainer": service, "progress": noting(tmp_path, "p")})
    names = ("a", "n", "p")
    try:
        until(lambda: all(pids(tmp_path, name) for name in names), "all start")
        up.kill()
        up.wait()
        until(lambda: not any(is_running(pids(tmp_path, name)[0]) for name in names), "all have ended")
    finally:
        end(up, *(pid for name in names for pid in pids(tmp_path, name)))


def test_a_run_whose_log_is_on_a_full_disk_ends_as_any_other(tmp_path: Path) -> None:
    """Its last lines cannot be written, and closing the file raises; its end is to be told."""
    log = tmp_path / "up.log"
    log.symlink_to("/dev/full")
    up = supervised({"alpha-trainer": "echo its last words; exit 3"}, stdout=subprocess.PIPE, log_file=str(log))
    try:
        said, _ = up.communicate(timeout=DEADLINE_S)
    finally:
        end(up)
    assert up.returncode == 3 and b"its last words" in said and b"Traceback" not in said, said
