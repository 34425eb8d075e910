"""Measures how long a person waits for a `swarm` command: each in a new process, with and without a
server.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import Result, say
from swarm_cli.installation import DEMO_CONFIG
from tests.integration.page_swarm import PageSwarm, usual
from tests.nats_server import NatsServer

BAR_S = 2.0
TIMES = 5
ALONE = (
    ("--version",),
    ("--help",),
    ("up", "--help"),
    ("up", "--print-procfile"),
    ("config", "show"),
    ("config", "check", "--config", str(DEMO_CONFIG)),
    ("task", "list"),
    ("task", "show", "gcd"),
    ("model", "--help"),
    ("experiment", "--help"),
    ("k8s", "--help"),
    ("nats", "--help"),
)
"""Commands that need no server."""
ASKING = (
    ("status",),
    ("status", "--json"),
    ("top", "--once"),
    ("rollouts", "alpha"),
    ("rollouts", "alpha", "--json", "--limit", "100"),
    ("trace", "abcdef012345"),
    ("dlq", "list"),
)
"""Commands that query a server with two nodes of six batches each."""


async def measure_commands() -> Result:
    """The result is the median of the slowest command."""
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats").start()
        try:
            swarm = await PageSwarm.open(server.url)
            await usual(swarm)
            await swarm.transport.close()
            medians = await asyncio.to_thread(_medians, Path(folder), server.url)
        finally:
            server.stop()
    slowest = max(wall_s for wall_s, _ in medians.values())
    return Result(
        row="commands",
        measured=f"seconds until a command of `swarm` has ended, the slowest of {len(medians)} by its median",
        against=f"{BAR_S:g} s",
        workload=f"each command {TIMES} times in a new process, the files it reads in the page cache; a NATS server on loopback "
        "with two nodes and six batches each for commands that ask one",
        unit="s",
        ratios=[slowest / BAR_S],
        bar=1.0,
        direction="at most",
        product=slowest,
        plain=None,
        remarks=[f"`{command}`: {wall_s:.2f} s, {cpu_s:.2f} s of processor time" for command, (wall_s, cpu_s) in medians.items()],
    )


def _medians(folder: Path, url: str) -> dict[str, tuple[float, float]]:
    """By command, the median seconds of wall clock and of processor time."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    environment["SWARM_NODE__VAR_DIR"] = str(folder / "var")
    asked = [(command, command) for command in ALONE] + [(command, (*command, "--node-url", url)) for command in ASKING]
    found = {}
    for name, command in asked:
        times = [_seconds(command, environment) for _ in range(TIMES)]
        found["swarm " + " ".join(_shown(word) for word in name)] = tuple(map(statistics.median, zip(*times, strict=True)))
        say(f"{name}: {times}")
    return {name: (wall_s, cpu_s) for name, (wall_s, cpu_s) in found.items()}


def _shown(word: str) -> str:
    return "FILE" if "/" in word else word


def _seconds(command: Sequence[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds of wall clock and of processor time for one command. Its exit code does not matter
    here.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm_cli", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, _, used = os.wait4(process.pid, 0)
    return time.monotonic() - started, used.ru_utime + used.ru_stime
