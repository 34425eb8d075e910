"""Measures how many of the swarm's messages a node reads for each foreign group that it uses,
beside a busy swarm.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from benchmarks.crowd import Crowd, crowd_process
from benchmarks.measuring import Result, say
from benchmarks.waiting import free_ports
from benchmarks.workload import node_config, running_server
from shared.config import load_config
from shared.runtime import ServiceContext
from swarm_cli.installation import DEMO_CONFIG
from tests.integration.running_verifier import verifier, want

STEPS, IDENTITIES, PER_S = 60, 20, 40.0
J, AHEAD, USED_PER_S = 6, 36, 2.0
FILLING_S, USING_S = 120.0, 30.0
TIMEOUT_S = 400.0
RUN = "bench-reading"
VERIFIER_CPU_S = "verifier CPU s"

_WANTED = {
    "swarm_ingest_read_total": "read",
    "swarm_ingest_accepted_total": "accepted",
    'swarm_sample_source_total{source="external"}': "drawn",
    'swarm_trainer_groups_total{origin="external"}': "trained",
    "swarm_trainer_mastered_groups_total": "mastered",
}


async def measure_reading() -> Result:
    """Run `swarm up --nodes 2` beside the crowd, and add up both nodes' figures."""
    folder = Path("var/runs") / RUN
    shutil.rmtree(folder, ignore_errors=True)
    nats_port, base_port = free_ports(), free_ports(16)
    started = time.monotonic()
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm_cli", "up", "--nodes", "2", "--steps", str(STEPS), "--run", RUN),
        *("--nats-port", str(nats_port), "--base-port", str(base_port)),
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    pages: dict[int, str] = {}
    try:
        async with crowd_process(_crowd(f"nats://127.0.0.1:{nats_port}", TIMEOUT_S)):
            while node.returncode is None:
                if time.monotonic() - started > TIMEOUT_S:
                    raise RuntimeError(f"{STEPS} steps were not done within {TIMEOUT_S:.0f} s")
                pages |= await asyncio.to_thread(_pages, range(base_port, base_port + 16))
                await asyncio.sleep(1.0)
    finally:
        if node.returncode is None:
            os.killpg(node.pid, signal.SIGTERM)
            await node.wait()
    if node.returncode != 0:
        raise RuntimeError(f"swarm up ended with code {node.returncode}: see the logs in {folder}")
    found = _figures(pages.values())
    say(", ".join(f"{name} {count:g}" for name, count in found.items()))
    shutil.rmtree(folder, ignore_errors=True)
    drawn = found["read"] / found["drawn"]
    return Result(
        row="reading",
        measured="messages read from the swarm for each foreign group drawn into a batch",
        against="(no other side)",
        workload=f"`swarm up --nodes 2 --steps {STEPS}` beside {IDENTITIES} keys that share {PER_S:g} groups a second",
        unit="messages",
        ratios=[drawn],
        bar=1.5,
        direction="at most",
        product=drawn,
        plain=None,
        remarks=[
            f"{found['read'] / found['trained']:.2f} messages for each foreign group trained on (bar 4)",
            f"of both nodes: read {found['read']:g}, accepted {found['accepted']:g}, drawn {found['drawn']:g}, trained on "
            f"{found['trained']:g}, mastered {found['mastered']:g}; CPU time of a verifier {found[VERIFIER_CPU_S] / 2:.1f} s in "
            f"{time.monotonic() - started:.0f} s, the start included",
        ],
    )


async def measure_reading_alone() -> Result:
    """A verifier in this process beside the crowd, with a sampler that only counts."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_server(Path(folder)) as server:
            return await _alone(Path(folder), server.url)


async def _alone(folder: Path, url: str) -> Result:
    """Fill the pool, then use groups at an even rate. The sampler is a count, so that no model's
    speed is in the figures.
    """
    tasks = [spec.model_dump(include={"dataset", "weight", "config"}) for spec in load_config(DEMO_CONFIG).tasks]
    config = node_config(
        folder, url, nats={"node_url": url, "swarm_url": url}, tasks=tasks, sampler={"external": J}, verifier={"newcomer_groups": 0}
    )
    async with verifier(config, wants=0) as running, crowd_process(_crowd(url, FILLING_S + USING_S + 30.0)):
        scored, used = 0, 0
        told, filled_at, began = -1, 0.0, time.monotonic()
        at_filling, due, due_at, delays = 0.0, 0, 0.0, list[float]()
        while not filled_at or time.monotonic() - filled_at < USING_S:
            scored = int(running.status.get("accepted"))
            if not filled_at and scored >= AHEAD:
                filled_at, at_filling = time.monotonic(), _read(running)
                say(f"{AHEAD} groups accepted {filled_at - began:.1f} s after the crowd began, {at_filling:g} read")
            if filled_at:
                used = min(scored, int((time.monotonic() - filled_at) * USED_PER_S))
            wanted = max(0, math.ceil((AHEAD - scored + used) / J) * J)
            if due_at and scored >= due:
                delays, due_at = [*delays, time.monotonic() - due_at], 0.0
            if wanted != told:
                if filled_at and told == 0:
                    due, due_at = scored + wanted, time.monotonic()
                told = wanted
                await want(running.node, config.node.id, wanted, scored)
            if not filled_at and time.monotonic() - began > FILLING_S:
                raise RuntimeError(f"{AHEAD} groups were not accepted within {FILLING_S:.0f} s")
            await asyncio.sleep(0.05)
        read, accepted = _read(running), running.status.get("accepted")
    return Result(
        row="reading-alone",
        measured="messages read from the swarm for each foreign group accepted, all of which are used",
        against="(no other side)",
        workload=f"one verifier whose sampler uses {USED_PER_S:g} groups a second of {PER_S:g} that {IDENTITIES} keys share",
        unit="messages",
        ratios=[read / accepted],
        bar=1.5,
        direction="at most",
        product=read / accepted,
        plain=None,
        remarks=[
            f"the first {AHEAD} groups: {at_filling:g} read, {filled_at - began:.1f} s from the start of the crowd",
            f"then {read - at_filling:g} read for {used} used",
            f"from a deficit of {J} groups to their acceptance: {statistics.median(delays or [math.nan]):.1f} s (median)",
        ],
    )


def _crowd(url: str, seconds: float) -> Crowd:
    return Crowd(url=url, identities=IDENTITIES, each_per_s=PER_S / IDENTITIES, seconds=seconds, demo=True)


def _read(running: ServiceContext) -> float:
    return running.registry.get_sample_value("swarm_ingest_read_total") or 0.0


def _pages(ports: range) -> dict[int, str]:
    """What the services on these ports export."""
    found = {}
    for port in ports:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2.0) as answer:
                found[port] = answer.read().decode()
        except OSError:
            continue
    return found


def _figures(pages: Iterable[str]) -> dict[str, float]:
    """The figures of all services together."""
    counts = dict.fromkeys([*_WANTED.values(), VERIFIER_CPU_S], 0.0)
    for page in pages:
        for name, label in _WANTED.items():
            counts[label] += metric(page, name)
        if "swarm_ingest_read_total" in page:
            counts[VERIFIER_CPU_S] += metric(page, "process_cpu_seconds_total")
    return counts


def metric(page: str, name: str) -> float:
    """A value without labels on a page of metrics; 0 if it is not there."""
    line = re.search(rf"^{re.escape(name)} (\S+)$", page, re.M)
    return float(line[1]) if line else 0.0
