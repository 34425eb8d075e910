"""A real `run_lines` in a process of its own, over small shell processes, for tests of its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys
from pathlib import Path
from swarm_cli.local.supervisor import run_lines
lines, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
if "log_file" in options:
    options["log_file"] = Path(options["log_file"])
sys.exit(run_lines(lines, {}, **options).code)
"""
DEADLINE_S = 180.0


def supervised(lines: dict[str, str], *, stdout: int = subprocess.DEVNULL, **options: object) -> subprocess.Popen[bytes]:
    """Start it. `options` are those of `run_lines`."""
    command = [sys.executable, "-c", RUN, json.dumps(lines), json.dumps(options)]
    return subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.STDOUT, start_new_session=True)


def noting(folder: Path, name: str, rest: str = "exec sleep 1000") -> str:
    """A line that writes its process number to `folder/name.pid`, one more each time it starts."""
    return f"echo $$ >> {folder}/{name}.pid; {rest}"


def ticking(folder: Path) -> str:
    """A line that writes `tick`, and a number to `folder/tick.pid`, again and again."""
    return f"while :; do echo tick; echo $$ >> {folder}/tick.pid; sleep 0.05; done"


def pids(folder: Path, name: str) -> list[int]:
    """The numbers of the process `name`, oldest first."""
    file = folder / f"{name}.pid"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def is_running(pid: int) -> bool:
    """Return whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(found: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < deadline, f"it did not come to it that {what}"
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes], *left: int) -> None:
    """Leave nothing behind, whatever the test found."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for pid in left:
        if is_running(pid):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
