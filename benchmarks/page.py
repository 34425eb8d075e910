"""Measures how long a browser takes to show the page of a swarm of a hundred nodes."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

from benchmarks.measuring import Result, say
from tests.integration.page_looker import Looker, a_browser
from tests.integration.page_swarm import Dashboard, PageSwarm, a_hundred
from tests.nats_server import NatsServer

BAR_S = 1.0
TIMES = 9


async def measure_page() -> Result:
    """The result is the median of the loads in one browser, each in a tab of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats").start()
        try:
            swarm = await PageSwarm.open(server.url, Path(folder) / "runs" / "dev")
            await a_hundred(swarm)
            await swarm.transport.close()
            times, size = await asyncio.to_thread(_loads, Path(folder), server.url)
        finally:
            server.stop()
    return Result(
        row="page",
        measured="seconds from the start of the load until the swarm's page is drawn",
        against=f"{BAR_S:g} s",
        workload="a swarm of 100 nodes, 97 of them with long names, twenty scores and a group of 16 completions each; "
        f"`swarm dashboard` and Chromium on one machine, {TIMES} loads",
        unit="s",
        ratios=[time_s / BAR_S for time_s in times],
        bar=1.0,
        direction="at most",
        product=statistics.median(times),
        plain=None,
        remarks=[f"{size:,} bytes a load"],
    )


def _loads(folder: Path, url: str) -> tuple[list[float], int]:
    """Seconds of each load, and the bytes of the last."""
    shown = Dashboard(url, var_dir=folder)
    try:
        shown.until_state("running")
        times, sizes = [], []
        with a_browser() as browser:
            for number in range(-1, TIMES):  # the first load does not count: the browser starts
                looker = Looker(browser)
                sizes = []
                looker.page.on(
                    "response", lambda response, into=sizes: into.append(int(response.headers.get("content-length", "0")))
                )
                page = looker.open(shown.url)
                times.append(page.evaluate("performance.now()") / 1000)
                assert page.locator("#leaderboard tbody tr").count() == 100
                assert page.locator("#exchange thead th").count() == 1 + 24 + 1, "the most senders, and the others"
                looker.close()
                say(f"load {number + 1}/{TIMES}: {times[-1]:.3f} s, {sum(sizes):,} bytes")
        return times[1:], sum(sizes)
    finally:
        shown.close()
