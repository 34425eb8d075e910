"""A process that takes its time to end is waited for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = """
import signal, sys, time
def end(*_):
    time.sleep(6.5)
    open(sys.argv[1], "w").write("ended by itself")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(sys.argv[2], "w").write("ready")
time.sleep(100)
"""
QUICK = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""
RUN = "import sys, json; from swarm_cli.local.supervisor import run_lines; sys.exit(run_lines(json.loads(sys.argv[1]), {}).code)"


@pytest.mark.slow
def test_a_process_that_takes_seven_seconds_to_end_is_not_killed(tmp_path: Path) -> None:
    ended, ready = tmp_path / "ended", tmp_path / "ready"
    lines = {
        "slow": "exec " + shlex.join([sys.executable, "-c", SLOW, str(ended), str(ready)]),
        "progress": "exec " + shlex.join([sys.executable, "-c", QUICK, str(ready)]),
    }
    command = [sys.executable, "-c", RUN, json.dumps(lines)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env={**os.environ})
    assert ended.exists(), found.stdout + found.stderr
    assert "SIGKILL" not in found.stdout
    assert found.returncode == 0
