"""A swarm that `swarm up` starts, in a folder and on ports of its own."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests import forked
from tests.forked_commands import Commands
from tests.nats_server import find_binary, free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 480.0
STARTS_PROCESSES = ("up",)
"""Commands that are started as users start them; the others are forked."""


class Swarm:
    """One `swarm up` in a folder of its own, and other `swarm` commands that look at it."""

    def __init__(self, folder: Path, python: Path | None = None, **settings: str) -> None:
        """python: with which `swarm up` starts its services, see `python_that_forks`. settings:
        environment variables.
        """
        self.folder = folder
        self.python = python
        self.nats_port = free_port()
        self.base_port = free_port_range()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SWARM_")},
            "SWARM_NODE__VAR_DIR": str(folder / "var"),
            "SWARM_EVAL__TASKS": "8",
            "SWARM_TRAINER__CHECKPOINT_EVERY": "2",
            "SWARM_VERIFIER__WORKERS": "1",
            **settings,
        }

    def up(self, *arguments: str) -> subprocess.Popen[str]:
        ports = ["--nats-port", str(self.nats_port), "--base-port", str(self.base_port)]
        return self._start("up", "--run", "first", *ports, *arguments)

    def up_to_the_end(self, *arguments: str, timeout_s: float = START_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """`swarm up` of a run that ends by itself. Fails if it has not after `timeout_s`."""
        process = self.up(*arguments)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=180)
            pytest.fail(f"swarm up {' '.join(arguments)} did not end by itself:\n{out[-6000:]}\n{err[-2000:]}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # A forked process looks for installed packages where this one did when it started.
        if arguments[0] not in STARTS_PROCESSES and self.environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH"):
            return forked.run("swarm_cli", arguments, environment=self.environment, cwd=ROOT, timeout=START_TIMEOUT_S)
        process = self._start(*arguments)
        out, err = process.communicate(timeout=START_TIMEOUT_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    @contextmanager
    def resting(self, node: str) -> Iterator[None]:
        """Suspend a node's generator, so that its trainer, which takes steps as fast as it can,
        leaves the processors to others.
        """
        started = [line for line in map(json.loads, (self.node_dir(node) / "generator.log").open()) if line["event"] == "started"]
        os.kill(started[-1]["pid"], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(started[-1]["pid"], signal.SIGCONT)

    def status(self, *nodes: str) -> dict[str, Any]:
        answer = self.call("status", *(nodes or ("alpha", "beta")), "--json", "--node-url", f"nats://127.0.0.1:{self.nats_port}")
        found: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
        return found

    def node_dir(self, node: str) -> Path:
        return self.folder / "var" / "runs" / "first" / node

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*swarm_with(self.python), *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def swarm_with(python: Path | None) -> list[str]:
    """The words of the command `swarm`; `python`: what it takes for its own interpreter."""
    if python is None:
        return [sys.executable, "-m", "swarm_cli"]
    code = (
        f"import runpy, sys; sys.executable = {str(python)!r}; runpy.run_module('swarm_cli', run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code]


@contextmanager
def python_that_forks(folder: Path) -> Iterator[Path]:
    """A `python` that has services forked, for tests that are not about how they are started: each
    would import for four seconds of a processor.
    """
    commands, programs = Commands(folder), folder / "programs"
    programs.mkdir()
    (programs / "nats-server").symlink_to(find_binary())
    commands.python(programs / "python", "services")
    try:
        yield programs / "python"
    finally:
        commands.close()


_PORTS_OF_A_SWARM = 40
_held: list[TextIO] = []


def free_port_range() -> int:
    """A port that is free with its 39 successors, and that no other test is given while this
    process lives: the file that stands for them is locked.
    """
    folder = Path(tempfile.gettempdir()) / "swarm-test-ports"
    folder.mkdir(exist_ok=True)
    first = free_port()
    for block in range(500):
        port = 10_000 + _PORTS_OF_A_SWARM * ((first + block) % 500)
        lock = (folder / str(port)).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for number in range(port, port + _PORTS_OF_A_SWARM):
                _refuse_taken(number)
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
    raise RuntimeError(f"no {_PORTS_OF_A_SWARM} ports in a row are free between 10000 and 30000")


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
