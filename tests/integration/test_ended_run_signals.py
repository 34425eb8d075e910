"""However a command ends that looks at a run which has ended, neither its copy nor its server
stays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_cli.local.run_note import write_note
from swarm_cli.looking.store_copy import COPIES, STORE
from swarm_cli.run_end import write_end
from swarm_cli.running import RunNote
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
COMMANDS = {
    "status": "from swarm_cli.observe import status as module; module.take_snapshot = wait; wanted = ['status']",
    "rollouts": "from swarm_cli.rollouts import command as module; module._batched = wait; wanted = ['rollouts', 'alpha']",
    "trace": "from swarm_cli.trace import command as module; module._find = wait; wanted = ['trace', 'abcdef']",
}
"""The commands that end by themselves, held where they look."""
HELD = """
import asyncio, sys
async def wait(*_, **__):
    print("looking", flush=True)
    await asyncio.sleep(600)
{patch}
sys.argv = ["swarm", *wanted, "--run", "first"]
from swarm_cli.app import main
main()
"""
COPYING = """
import sys, time
from swarm_cli.looking import store_copy
def copy(*_):
    print("copying", flush=True)
    time.sleep(600)
store_copy._share_or_copy = copy
sys.argv = ["swarm", "status", "--run", "first"]
from swarm_cli.app import main
main()
"""
"""A command held while it copies the first file."""


@pytest.fixture
def var_dir(tmp_path: Path) -> Iterator[Path]:
    """Where runs are, with one that ended; nothing of a look may be left when the test ends."""
    folder = tmp_path / "runs" / "first"
    server = NatsServer(tmp_path / "nats", jetstream=f'store_dir: "{folder}"').start()
    server.stop()
    (folder / STORE / "$G" / "streams" / "NODE_ALPHA_SCORED").mkdir(parents=True)
    write_note(folder, RunNote(server.url, server.url, "swarm up --run first"))
    write_end(folder, 0, "progress")
    yield tmp_path
    assert not (tmp_path / COPIES).exists(), "the copy is gone"
    assert not servers_below(tmp_path), "its server has ended"


def servers_below(folder: Path) -> list[int]:
    """NATS servers whose store is in the folder."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"nats-server") and any(word.startswith(bytes(folder)) for word in words):
            found.append(int(cmdline.parent.name))
    return found


def start(var_dir: Path, *command: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    environment |= {"SWARM_NODE__VAR_DIR": str(var_dir), "PYTHONHASHSEED": "0"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended_by(number: signal.Signals, process: subprocess.Popen[str]) -> str:
    """What it said, having ended in order and with the code that says so."""
    process.send_signal(number)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == CODES[number], said
    assert "Traceback" not in said, said
    return said


@pytest.mark.parametrize(("command", "number"), [("status", signal.SIGINT), ("rollouts", signal.SIGTERM), ("trace", signal.SIGHUP)])
def test_a_command_that_is_ended_while_it_looks_takes_its_copy_along(command: str, number: signal.Signals, var_dir: Path) -> None:
    process = start(var_dir, sys.executable, "-c", HELD.format(patch=COMMANDS[command]))
    assert process.stdout is not None
    assert process.stdout.readline() == "looking\n", process.communicate()
    assert len(servers_below(var_dir)) == 1 and (var_dir / COPIES).is_dir()
    ended_by(number, process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_while_it_copies_takes_its_copy_along(number: signal.Signals, var_dir: Path) -> None:
    (var_dir / "runs" / "first" / STORE / "$G" / "streams" / "NODE_ALPHA_SCORED" / "1.blk").write_bytes(b"block")
    process = start(var_dir, sys.executable, "-c", COPYING)
    assert process.stdout is not None
    assert process.stdout.readline() == "copying\n", process.communicate()
    assert list((var_dir / COPIES).glob(f"*/{STORE}/*/streams/NODE_ALPHA_SCORED"))
    ended_by(number, process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_page_that_is_ended_takes_its_copy_along(number: signal.Signals, var_dir: Path) -> None:
    from tests.integration.page_swarm import Dashboard

    shown = Dashboard("", var_dir, "--run", "first", var_dir=var_dir)
    shown.until_state("ended")
    assert len(servers_below(var_dir)) == 1
    shown.process.send_signal(number)
    said, _ = shown.process.communicate(timeout=DEADLINE_S)
    assert shown.process.returncode == (129 if number == signal.SIGHUP else 0), said


def test_a_copy_that_a_killed_command_left_elsewhere_goes_with_the_next_look(
    var_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("tmp")  # where nothing can be written beside the runs, copies are in the system's folder
    left = elsewhere / "swarm-look-left"
    (left / STORE).mkdir(parents=True)
    (left / "lock").touch()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    process = start(var_dir, sys.executable, "-m", "swarm_cli", "status", "--run", "first")
    process.communicate(timeout=DEADLINE_S)
    assert not left.exists()
