"""Of a running run's server that hangs, commands and page say what mends it, and no older run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shared.config import load_config
from swarm_cli.dashboard.swarm_source import SwarmSource
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.observe.progress import ProgressView
from swarm_cli.runs import LOCK, RunNote, StartOptions, runs_of_this_user, write_end, write_note
from swarm_cli.server_diagnosis import silent_server
from swarm_cli.target import default_target
from tests import forked
from tests.nats_server import NatsServer

ROOT = Path(__file__).parents[2]
AGAIN = "`swarm restart nats` starts it again (with `--now` if it hangs)"
AGAIN_FROM_ELSEWHERE = "`swarm restart nats --run mute` starts it again (with `--now` if it hangs)"


class Machine(NamedTuple):
    """here: the folder from which the run `mute` was started, with the ended run `old`; other: one
    with an ended run of its own.
    """

    here: Path
    other: Path
    server: NatsServer


@pytest.fixture
def hanging(tmp_path: Path, nats_server: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A run of an hour whose server hangs."""
    for variable in ("SWARM_NODE__VAR_DIR", "SWARM_NATS__NODE_URL", "SWARM_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    here, other, server = tmp_path / "here", tmp_path / "other", nats_server()
    for place in (here, other):
        old = place / "var" / "runs" / "old"
        with holding_run(old):
            write_note(old, RunNote("nats://127.0.0.1:1", "none", StartOptions()))
        write_end(old, 0, "progress")
    now = here / "var" / "runs" / "mute"
    with holding_run(now):
        write_note(now, RunNote(server.url, server.url, StartOptions()))
        (now / "nats.log").touch()
        os.utime(now / LOCK, (time.time() - 3600,) * 2)
        os.kill(server.pid, signal.SIGSTOP)
        yield Machine(here, other, server)
        os.kill(server.pid, signal.SIGCONT)


def told_by(folder: Path, *words: str) -> str:
    """Return what the command says on standard error in this folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    done = forked.run("swarm_cli", words, environment=environment, cwd=folder, timeout=240)
    assert done.returncode == 1, done
    return done.stderr


@pytest.mark.parametrize("words", [["status"], ["top", "--once"], ["dlq", "list"]])
def test_a_command_names_the_run_whose_server_hangs_the_restart_and_the_log_and_no_older_run(
    hanging: Machine, words: list[str]
) -> None:
    said = told_by(hanging.here, *words)
    sentence = f"the NATS server of run mute does not answer: {AGAIN}; its log is var/runs/mute/nats.log"
    assert said.splitlines() == [f"swarm: {sentence}"], said


def test_from_another_folder_the_command_names_the_run(hanging: Machine) -> None:
    said = told_by(hanging.other, "status", "--node-url", hanging.server.url)
    log = hanging.here / "var" / "runs" / "mute" / "nats.log"
    assert f"run mute does not answer: {AGAIN_FROM_ELSEWHERE}; its log is {log}\n" in said
    assert len(said.splitlines()) == 1, said


async def test_the_page_says_the_same_and_does_not_show_an_older_run_s_end(
    hanging: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, restart in ((hanging.here, AGAIN), (hanging.other, AGAIN_FROM_ELSEWHERE)):
        monkeypatch.chdir(folder)
        config = load_config(DEMO_CONFIG)
        source = SwarmSource(config, default_target(config, hanging.server.url))
        assert await source.look() is None
        answered = source.answer("/swarm.json", {})
        assert answered is not None
        told = json.loads(answered[1])
        assert told["state"] == "waiting" and told["ended"] is None
        assert told["problem"].startswith(f"the NATS server of run mute does not answer: {restart}; its log is ")


async def test_the_progress_view_of_the_run_says_it_too(
    hanging: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(hanging.here)
    config = load_config(DEMO_CONFIG, {"nats": {"node_url": hanging.server.url}, "node": {"run": "mute"}})
    assert await ProgressView(config, ["alpha"], 1, 1.0)._read(time.monotonic()) is None
    assert "trying again (the NATS server of run mute does not answer: `swarm restart nats`" in capsys.readouterr().out


def test_nothing_is_said_of_a_server_that_answers_that_is_not_this_machine_s_or_that_just_starts(
    hanging: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hanging.here)
    var_dir, lock = Path("var"), hanging.here / "var" / "runs" / "mute" / LOCK
    assert silent_server(var_dir, hanging.server.url)
    assert silent_server(var_dir, "nats://127.0.0.1:1") == ""
    lock.touch()
    assert "restart" not in (told := silent_server(var_dir, hanging.server.url)) and "try again" in told
    os.utime(lock, (time.time() - 3600,) * 2)
    os.kill(hanging.server.pid, signal.SIGCONT)
    assert silent_server(var_dir, hanging.server.url) == ""


HOLDS = """
import pathlib, sys
from swarm_cli.local.control import holding_run
with holding_run(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("network", "is_found"), [([], True), (["unshare", "--user", "--map-root-user", "--net"], False)])
def test_a_run_in_another_network_is_none_of_this_machines(tmp_path: Path, network: list[str], is_found: bool) -> None:
    """Its 127.0.0.1 is not ours: a command here would speak of the wrong server."""
    if subprocess.run([*network, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("no network namespaces may be made here")
    folder = tmp_path / "runs" / "other"
    command = [*network, sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"held\n"
        assert (folder in runs_of_this_user()) is is_found
        process.stdin.close()
        assert process.wait(60) == 0
