"""Fills the disk of a run's server, and prints as JSON what each view says then, and later:
`python -m tests.integration.full_server FOLDER`. FOLDER is on a small disk of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from shared.config import load_config
from shared.contracts import subjects
from shared.transport.base import TransportError
from shared.transport.connect import connect
from swarm_cli.dashboard.swarm_source import SwarmSource
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.observe.progress import ProgressView
from swarm_cli.runs import LOCK, RunNote, StartOptions, write_note
from swarm_cli.server_diagnosis import cannot_store
from swarm_cli.target import default_target
from tests.integration.page_swarm import PageSwarm
from tests.nats_server import NatsServer

NODES = ("alpha", "beta")


def main(folder: Path) -> dict[str, str]:
    """Return what was said, by view and moment."""
    var_dir, ballast = folder / "var", folder / "ballast"
    run = var_dir / "runs" / "now"
    server = NatsServer(run, config="http: 127.0.0.1:-1")
    server.arguments = ["--ports_file_dir", str(run)]
    with holding_run(run):
        server.start()
        try:
            write_note(run, RunNote(server.url, server.url, StartOptions()))
            os.utime(run / LOCK, (time.time() - 3600,) * 2)
            asyncio.run(silent(server.url))
            told = {"before": cannot_store(var_dir, server.url)}
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * 4096)
            told["write"] = asyncio.run(written(server.url))
            told |= commands(var_dir) | asyncio.run(page_and_progress(var_dir, server.url))
            ballast.unlink()
            told["write with space"] = asyncio.run(written(server.url))
            told["with space"] = cannot_store(var_dir, server.url)
            server.restart()
            told["write restarted"] = asyncio.run(written(server.url))
            told["restarted"] = cannot_store(var_dir, server.url)
            return told
        finally:
            server.stop()


async def silent(url: str) -> None:
    """Write what the processes of two nodes would have written a minute ago."""
    swarm = await PageSwarm.open(url)
    for node in NODES:
        await swarm.node(node, age_s=60.0)
    await swarm.transport.close()


async def written(url: str) -> str:
    """Write as processes do; returns the error, if one came."""
    plane = await connect(url, name="test", timeout_s=10)
    try:
        for _ in range(8):
            await plane.kv.put(subjects.node_bucket("alpha"), "test", b"x" * 8000)
    except TransportError as error:
        return str(error)
    finally:
        await plane.close()
    return ""


def commands(var_dir: Path) -> dict[str, str]:
    environment = os.environ | {"SWARM_NODE__VAR_DIR": str(var_dir), "COLUMNS": "400"}
    told = {}
    for words in (["status"], ["top", "--once"]):
        command = [sys.executable, "-m", "swarm_cli", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
        told[words[0]] = done.stdout
    return told


async def page_and_progress(var_dir: Path, url: str) -> dict[str, str]:
    config = load_config(DEMO_CONFIG, {"node": {"run": "now", "var_dir": str(var_dir)}, "nats": {"node_url": url}})
    source = SwarmSource(config, default_target(config, url))
    await source.look()
    page = json.loads((source.answer("/swarm.json", {}) or (0, b"{}"))[1])
    view = ProgressView(config, NODES, 1, 1.0)
    with contextlib.redirect_stdout(io.StringIO()):
        views = await view._read(time.monotonic())
    return {"page": page["problem"], "page's state": page["state"], "progress": "\n".join(view._remedies(views or []))}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
