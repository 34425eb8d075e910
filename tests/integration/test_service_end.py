"""How a service process ends when its server is gone: asked to stop, it has stopped; not asked, it
has crashed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarm_cli.shipped import DEMO_CONFIG
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
SERVICE = """
import asyncio
from shared.runtime.service import main

class Waits:
    async def run(self, context):
        context.log.info("waits")
        while context.node.connected:
            await asyncio.sleep(0.05)
        if {asked}:
            await context.stopping.wait()
        await context.node.kv.get("node_alpha", "nothing")

main("sampler", lambda config: Waits())
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
