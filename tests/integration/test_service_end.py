"""How a service process ends: when its server is gone, asked or not; and how scrapes see it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from swarm_cli.installation import DEMO_CONFIG
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
SERVICE = """
import asyncio
from shared.config.sampler_section import SamplerConfig
from shared.runtime.service import main

class Waits:
    async def run(self, context):
        context.log.info("waits")
        while context.node.connected and not context.stopping.is_set():
            await asyncio.sleep(0.05)
        if context.node.connected:
            return
        if {asked}:
            await context.stopping.wait()
        await context.node.kv.get("node_alpha", "nothing")

main("sampler", SamplerConfig, lambda config: Waits())
"""


def start(server: NatsServer, folder: Path, *, asked: bool) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    settings = {
        "SWARM_NODE__ID": "alpha",
        "SWARM_NODE__VAR_DIR": str(folder),
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_HTTP__BASE_PORT": "0",
        "SWARM_LOG__FORMAT": "json",
    }
    command = [sys.executable, "-c", SERVICE.format(asked=asked), "--config", str(DEMO_CONFIG)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**clean, **settings, "SWARM_LOG__LEVEL": "info"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(("asked", "code", "told"), [(True, 0, "stopped_without_server"), (False, 1, "crashed")])
def test_a_service_whose_server_is_gone_ends_well_only_when_it_was_asked_to(
    server: NatsServer, tmp_path: Path, asked: bool, code: int, told: str
) -> None:
    process = start(server, tmp_path, asked=asked)
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if '"waits"' in line:
            break
    server.kill()
    if asked:
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=180)
    assert process.returncode == code, said + rest
    assert told in rest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_s", "late_s", "at_most_s"), [(2.0, 0.0, 5.0), (3.0, 3.0, 9.0), (0.0, 0.0, 2.0)], ids=["scraped", "late", "not scraped"]
)
def test_a_process_that_is_scraped_tells_the_last_scrape_that_it_was_asked_to_stop(
    server: NatsServer, tmp_path: Path, every_s: float, late_s: float, at_most_s: float
) -> None:
    process = start(server, tmp_path, asked=False)
    assert process.stdout is not None
    port, requested = 0, re.compile(r"^swarm_stop_requested_timestamp_seconds (\S+)$", re.MULTILINE)
    for line in process.stdout:
        port = json.loads(line).get("http_port", port)
        if '"waits"' in line:
            break

    def scrape() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return float(requested.findall(answer.read().decode())[0])

    if every_s:
        assert scrape() == 0
        time.sleep(every_s)
        assert scrape() == 0
        if late_s:
            assert scrape() == 0, "after a stall, two that waited are answered at once"
        time.sleep(0.2)
    asked_at, asked_s = time.time(), time.monotonic()
    process.send_signal(signal.SIGTERM)
    if every_s:
        time.sleep(every_s - 0.2 + late_s)
        assert scrape() == pytest.approx(asked_at, abs=1.0), "it is still there to be scraped"
    process.communicate(timeout=60)
    assert process.returncode == 0 and time.monotonic() - asked_s < at_most_s
