"""The views of a run on this machine name the command that starts a silent process again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import ServiceStatus
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.runs import LOCK, RunNote, StartOptions, write_note
from tests.integration.page_swarm import PageSwarm
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
NAMED = "`swarm restart alpha-verifier` starts it again (with `--now` if it hangs)"
DEADLINE_S = 180.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    running = NatsServer(tmp_path / "nats").start()
    asyncio.run(_alpha_whose_verifier_is_silent(running.url))
    yield running
    running.stop()


async def _alpha_whose_verifier_is_silent(url: str) -> None:
    swarm = await PageSwarm.open(url)
    await swarm.node("alpha", age_s=-3600.0)  # the others stay alive, however long the commands take
    now = time.time()
    silent = ServiceStatus(
        node="alpha", role="verifier", replica="0", pid=1, host="h", state="scoring",
        started_at=now - 5000, updated_at=now - 100, figures={},
    )  # fmt: skip
    await swarm.transport.kv.put(subjects.node_bucket("alpha"), subjects.status_key("verifier", "0"), encode(silent))
    await swarm.transport.close()


def command(*words: str, url: str) -> tuple[list[str], dict[str, str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "SWARM_NODE__RUN": "one", "SWARM_NATS__NODE_URL": url}
    return [sys.executable, "-m", "swarm_cli", *words], environment


def said(folder: Path, *words: str, url: str) -> str:
    line, environment = command(*words, url=url)
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_status_top_and_the_progress_view_name_the_restart_of_a_silent_process(server: NatsServer, tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / "one"
    with holding_run(folder):
        os.utime(folder / LOCK, (time.time() - 300, time.time() - 300))  # it was started before the last words
        write_note(folder, RunNote(server.url, server.url, StartOptions(), "first", str(tmp_path)))
        assert NAMED in said(tmp_path, "status", url=server.url)
        assert NAMED in said(tmp_path, "top", "--once", url=server.url)
        line, environment = command("progress", "alpha", "--every-s", "0.2", "--config", str(DEMO_CONFIG), url=server.url)
        with subprocess.Popen(line, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as progress:
            assert progress.stdout is not None
            try:
                lines = [progress.stdout.readline()]
                while len(lines) < 12 and f"         {NAMED}\n" not in lines:
                    lines.append(progress.stdout.readline())
            finally:
                progress.kill()
        assert f"         {NAMED}\n" in lines, lines
    for words in (["status"], ["top", "--once"]):
        assert "swarm restart" not in said(tmp_path, *words, url=server.url), "whose run it is, is not known"
