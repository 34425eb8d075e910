"""A process that judges foreign text does not outlive the one that forked it, however early that
ends.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, time
from shared.runtime.process_limits import end_with_parent

read_end, write_end = os.pipe()
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        while {waits}:
            time.sleep(0.01)
        end_with_parent(signal.SIGKILL, parent)
        os.write(write_end, b"lives")
        os._exit(0)
    {parent_goes_on}
    os._exit(0)
os.close(write_end)
print(os.read(read_end, 9))
"""


def told(waits: str, parent_goes_on: str) -> str:
    program = PROGRAM.format(waits=waits, parent_goes_on=parent_goes_on)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_process_whose_parent_ended_before_it_could_ask_to_be_told_ends() -> None:
    assert told("os.getppid() == parent", "pass") == "b''\n"
    assert told("False", "os.wait()") == "b'lives'\n"
