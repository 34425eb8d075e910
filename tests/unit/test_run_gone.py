"""What the commands that look at a swarm say once its run, and its server with it, has ended: how
it ended, as `swarm status` says it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from swarm_cli.runs import NOTE, RunNote, StartOptions, write_end, write_note
from tests.nats_server import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
COMMANDS = [
    ("ban", ("beta",)),
    ("unban", ("beta",)),
    ("dlq", ("list",)),
]


@pytest.fixture
def var_dir(tmp_path: Path) -> Path:
    """Where run `one` failed, and run `older` took its steps before that on another port."""
    for run, code, process in (("older", 0, "progress"), ("one", 70, "alpha-trainer")):
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True)
        url = f"nats://127.0.0.1:{free_port()}"
        write_note(folder, RunNote(url, url, StartOptions(1)))
        write_end(folder, code, process)
    return tmp_path


@cache
def alone() -> tuple[str, ...]:
    """Return the prefix that gives a command namespaces of its own, where it sees none of this
    machine's runs and servers. Empty where they are not allowed.
    """
    prefix = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc")
    prefix += ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    tried = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True, timeout=60, check=False)
    return prefix if tried and tried.returncode == 0 else ()


def ask(var_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "SWARM_CONFIG"}
    environment |= {"SWARM_NODE__VAR_DIR": str(var_dir)}
    command = [*alone(), sys.executable, "-m", "swarm_cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, env=environment, check=False)


@pytest.mark.parametrize(("command", "more"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_how_the_newest_run_ended_is_said_and_not_that_a_server_is_missing(
    var_dir: Path, command: str, more: tuple[str, ...]
) -> None:
    done = ask(var_dir, command, *more)
    assert done.returncode == 1, done.stderr
    first, second, *rest = done.stderr.splitlines()
    assert first.startswith("swarm: run one failed at ") and first.endswith(" ago: alpha-trainer ended with code 70")
    assert second == "swarm up --run one --nodes 1 starts it again"
    assert "no NATS server" not in done.stderr and "older" not in done.stderr
    assert [line for line in rest if not line.startswith(("Run ", "To look at a swarm elsewhere"))] == []


def test_of_a_server_that_was_named_its_own_run_is_said_or_that_nothing_listens(var_dir: Path) -> None:
    (older,) = (json.loads((var_dir / "runs" / "older" / NOTE).read_text())["node_url"],)
    said = ask(var_dir, "top", "--node-url", older).stderr
    assert "run older ended in order at " in said and "`swarm top --run older` shows it" in said and "no NATS server" not in said
    said = ask(var_dir, "top", "--node-url", f"nats://127.0.0.1:{free_port()}").stderr
    assert "no NATS server listens at" in said and "--node-url nats://HOST:PORT" in said
    assert "run one" not in said and "older" not in said
