"""Measures the share of the trainer's wall clock spent waiting for data, in the demo, with the
generator on its own core.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import Result, say


def free_ports(count: int = 1) -> int:
    """A port that is free with those after it, `count` in all, until another process takes one.

    Raises:
        OSError: a hundred places were tried.
    """
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + count <= 65_536 and all(_is_free(first + number) for number in range(count)):
            return first
    raise OSError(f"no {count} ports in a row are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


STEPS, WARM_UP, PARTS = 60, 15, 5
TIMEOUT_S = 280.0
RUN = "bench-waiting"


async def measure_waiting() -> Result:
    """Run `swarm up --nodes 1` and read the seconds by phase from its metrics."""
    cores = sorted(os.sched_getaffinity(0))
    folder = Path("var/runs") / RUN
    shutil.rmtree(folder, ignore_errors=True)
    environment = {**os.environ, "SWARM_SAMPLER__EXTERNAL": "0", "SWARM_SAMPLER__LOCAL": "8"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm_cli", "up", "--nodes", "1", "--steps", str(STEPS), "--run", RUN),
        *("--nats-port", str(free_ports()), "--base-port", str(free_ports(4))),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = folder / "alpha" / "metrics.jsonl"
    said = 0
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while process.returncode is None:
            if len(cores) > 1:
                pin(process.pid, generator={cores[0]}, others=set(cores[1:]))
            steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if steps >= said + 10:
                said = steps
                say(f"step {steps} of {STEPS}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{STEPS} steps were not done within {TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.5)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"swarm up ended with code {process.returncode}: see the logs in {folder}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    phases = [line["phase_seconds"] for line in lines if line["step"] > WARM_UP]
    shutil.rmtree(folder, ignore_errors=True)
    return result_of(phases, len(cores))


def result_of(phases: list[dict[str, float]], cores: int) -> Result:
    """The share over all steps after warm-up, which is compared with the bar. The spread over
    consecutive parts is a remark.
    """
    size = len(phases) // PARTS
    parts = [wait_share(phases[k * size : (k + 1) * size]) for k in range(PARTS)]
    total = {name: sum(each[name] for each in phases) / len(phases) for name in phases[0]}
    spent = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in total.items())
    median_s = statistics.median(sum(each.values()) for each in phases)
    return Result(
        row="waiting",
        measured="share of the trainer's wall clock spent waiting for data, demo configuration",
        against="(no other side)",
        workload=f"`swarm up --nodes 1 --steps {STEPS}`, I = 8, J = 0, all steps after the first {WARM_UP} together"
        + ("; generator pinned to one core, everything else to the others" if cores > 1 else "; one core only, nothing pinned"),
        unit="of the wall clock",
        ratios=[wait_share(phases)],
        bar=0.25,
        direction="at most",
        product=wait_share(phases),
        plain=None,
        remarks=[
            f"mean of a step's phases: {spent}; a step takes {median_s:.3f} s at the median",
            f"share in {PARTS} consecutive parts of the run: {', '.join(f'{part:.2f}' for part in parts)}",
            "one node, because with two nodes on two cores no generator has its own core; its batch is as large as the demo's "
            "(4 local and 4 foreign groups), but all local; the generator also evaluates every 25 versions",
        ],
    )


def wait_share(phases: list[dict[str, float]]) -> float:
    """Seconds waited divided by the seconds in all phases."""
    return sum(each["wait"] for each in phases) / sum(sum(each.values()) for each in phases)


def pin(root: int, *, generator: set[int], others: set[int]) -> None:
    """Bind every thread of `root` and its descendants to its cores; new threads inherit the
    binding.
    """
    for pid, command in descendants(root).items():
        cores = generator if "services.generator" in command and "supervise" not in command else others
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                if os.sched_getaffinity(int(thread)) != cores:
                    os.sched_setaffinity(int(thread), cores)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in the meantime


def descendants(root: int) -> dict[int, str]:
    """Command lines by process id of all descendants of `root`."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                parents[int(entry.name)] = (parent, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except (OSError, ValueError):
                continue
    found: dict[int, str] = {}
    level: set[Any] = {root}
    while level:
        level = {pid for pid, (parent, _) in parents.items() if parent in level}
        found.update({pid: parents[pid][1] for pid in level})
    return found
