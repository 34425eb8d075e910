"""The first process of a container waits for what others left behind, and for nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, ctypes, os, subprocess, sys
from swarm_cli.local.process import reaping_orphans

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # gets orphans, as the first process of a container does

def zombies():
    own = [pid for task in os.listdir("/proc/self/task") for pid in open(f"/proc/self/task/{task}/children").read().split()]
    return [pid for pid in own if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"]

async def main():
    own = subprocess.Popen(["sh", "-c", "exit 7"])
    subprocess.run(["sh", "-c", "sleep 0.1 & sleep 0.2 &"], check=True)
    async with reaping_orphans({own.pid}, first_process=sys.argv[1] == "first"):
        for _ in range(40):
            await asyncio.sleep(0.1)
            if len(zombies()) == int(sys.argv[2]):
                break
        await asyncio.sleep(0.6)
        print(len(zombies()), own.wait())

asyncio.run(main())
"""


def ran(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_orphans_are_reaped_and_the_end_of_an_own_process_is_left_for_whoever_waits_for_it() -> None:
    assert ran("first", "1") == "1 7"


def test_a_process_that_is_not_the_first_reaps_nothing_of_others() -> None:
    assert ran("other", "3") == "3 7"
