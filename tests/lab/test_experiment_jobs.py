"""Runs that are made side by side end with the command that makes them, even if it is killed."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.lab.tiny_swarm import write_spec
from tests.unit.supervised import is_running, until

PROGRAM = """
import sys
from pathlib import Path
from lab.jobs import make_runs
from lab.runs import run_folder
from lab.spec import load_spec

spec, out = load_spec(Path(sys.argv[1])), Path(sys.argv[2])
make_runs(spec, [run_folder(out, arm, 1) for arm in spec.arms], 2, print)
"""


def test_the_runs_of_a_command_that_is_killed_end_with_it(tmp_path: Path) -> None:
    spec, out = write_spec(tmp_path, rounds=1_000_000), tmp_path / "results"
    command = psutil.Popen([sys.executable, "-c", PROGRAM, spec, out])
    processes: list[psutil.Process] = []
    try:
        give_up_at = time.monotonic() + 240
        while len(list(out.glob("*/seed-1/records.jsonl.gz"))) < 2:
            assert command.poll() is None and time.monotonic() < give_up_at
            time.sleep(0.2)
        processes = command.children(recursive=True)
        assert len(processes) >= 4, "what tracks resources, the fork server, and a process for each run"
        command.kill()
        command.wait(60)
        until(lambda: not any(is_running(each.pid) for each in processes), "all processes have ended")
    finally:
        processes += command.children(recursive=True) if command.is_running() else []
        for left in [command, *processes]:
            with suppress(psutil.NoSuchProcess):
                left.kill()
