"""Which server a command looks at that was told of none, how a run is gone on with, and what a
refused start leaves.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.config import NodeConfig, load_config
from shared.transport.base import NotConnected
from swarm_cli import target
from swarm_cli.app import _where_to_look, app
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG, shown
from swarm_cli.local.control import holding_run
from swarm_cli.local.procfile import Layout
from swarm_cli.local.supervisor import Outcome
from swarm_cli.local.up import announce, explain_end, note_of, note_run, start_options
from swarm_cli.observe.progress import ProgressView
from swarm_cli.runs import LOCK, NOTE, RunNote, StartOptions, read_note, write_note
from swarm_cli.target import default_target, running_elsewhere

ROOT = Path(__file__).parents[2]


@pytest.fixture
def var_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.delenv("SWARM_NATS__NODE_URL", raising=False)
    return tmp_path


def configured(run: str = "one") -> NodeConfig:
    return load_config(DEMO_CONFIG, {"node": {"run": run}})


def running(stack: ExitStack, var_dir: Path, run: str, port: int) -> None:
    folder = var_dir / "runs" / run
    stack.enter_context(holding_run(folder))
    write_note(folder, note_of(Layout(nats_port=port, config=shown(DEMO_CONFIG)), StartOptions()))


def looked_at(node_url: str, swarm_url: str = "") -> tuple[str, str | None]:
    found = default_target(configured(), node_url, swarm_url)
    return found.node_url, found.swarm_url


def test_a_command_looks_at_the_only_running_run_unless_it_is_told_otherwise(
    var_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = configured().nats
    with ExitStack() as stack:
        running(stack, var_dir, "one", 21_001)
        assert looked_at("") == ("nats://127.0.0.1:21001",) * 2
        assert looked_at("nats://given:1") == ("nats://given:1",) * 2
        assert looked_at("", "none") == ("nats://127.0.0.1:21001", None)
        monkeypatch.setenv("SWARM_NATS__NODE_URL", "nats://configured:1")
        assert looked_at("")[0] == "nats://configured:1"
        monkeypatch.delenv("SWARM_NATS__NODE_URL")
    assert looked_at("") == (default.node_url, default.swarm_url), "its note stays, but nobody runs it"


def test_a_run_shares_where_its_processes_are_told_to_and_not_where_its_file_says(
    var_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that began as a copy of `swarm config show --all` names the default server."""
    copied = configured().model_copy(update={"nats": configured().nats.model_copy(update={"swarm_url": "nats://127.0.0.1:4222"})})
    folder = var_dir / "runs" / "one"
    folder.mkdir(parents=True)
    for outside, url in (("", "nats://127.0.0.1:21001"), ("nats://hub:4222", "nats://hub:4222"), ("none", "none")):
        monkeypatch.setenv("SWARM_NATS__SWARM_URL", outside)
        note_run(copied, Layout(nats_port=21_001, config=shown(DEMO_CONFIG)))
        note = read_note(folder)
        assert note is not None and note.swarm_url == url


def test_where_several_runs_are_running_the_command_names_them(var_dir: Path) -> None:
    with ExitStack() as stack:
        for number, run in enumerate(["one", "two"]):
            running(stack, var_dir, run, 21_001 + number)
        with pytest.raises(CommandError, match=r"--node-url nats://127.0.0.1:21001   run one\n.*21002   run two"):
            looked_at("")


@pytest.mark.slow
def test_a_command_that_finds_no_server_names_the_option(var_dir: Path) -> None:
    command = [sys.executable, "-m", "swarm_cli", "rollouts", "alpha", "--node-url", "nats://127.0.0.1:1"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert answer.returncode == 1 and "--node-url nats://HOST:PORT" in answer.stderr


def test_the_command_that_goes_on_with_a_run_starts_the_same_nodes_in_the_same_places() -> None:
    demo = shown(DEMO_CONFIG)
    plain = Layout(base_port=configured().http.base_port, config=demo)
    assert start_options(configured(), plain).command("one") == "swarm up --run one"
    moved = Layout(3, 21_001, 21_100, config=demo)
    assert start_options(configured(), moved).command("one") == "swarm up --run one --nodes 3 --nats-port 21001 --base-port 21100"
    other = Layout(1, nats_url="nats://hub:4222", base_port=9400, config=Path("my node.toml"), names=("gamma",))
    asked = shlex.split(start_options(configured(), other).command("one"))
    assert asked[4:] == [
        *("--nodes", "1", "--name", "gamma"),
        *("--config", os.path.abspath("my node.toml"), "--nats-url", "nats://hub:4222"),
    ]


def test_a_run_that_was_stopped_names_what_to_do_with_it_and_the_nodes_and_steps_that_it_was_given(
    var_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(1, config=shown(DEMO_CONFIG), names=("gamma",))
    (var_dir / "runs" / "one").mkdir(parents=True)
    note_run(configured(), layout, 40)
    explain_end(Outcome(0, None), configured(), layout)
    said = capsys.readouterr().err
    assert "swarm up --run one --nodes 1 --name gamma --steps 40 " in said and "swarm model export one gamma " in said, said
    assert "beta" not in said, "it has one node"


def test_a_runs_note_has_its_options_and_one_of_another_version_has_none(var_dir: Path) -> None:
    folder = var_dir / "runs" / "one"
    folder.mkdir(parents=True)
    note_run(configured(), Layout(3, config=shown(DEMO_CONFIG)))
    note = read_note(folder)
    assert note is not None and note.options == StartOptions(3)
    (folder / NOTE).write_text("{}")
    assert read_note(folder) is None


def test_a_start_with_fewer_nodes_than_the_run_has_names_those_that_stay_away(
    var_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in ("alpha", "beta", "gamma"):
        (var_dir / "runs" / "one" / node).mkdir(parents=True)
        (var_dir / "runs" / "one" / node / "trainer.log").touch()
    announce(configured(), Layout(2))
    said = capsys.readouterr().err
    assert "this run also has gamma, which is not started: --nodes 3 starts every node" in said
    announce(configured(), Layout(3))
    assert "not started" not in capsys.readouterr().err


def test_a_refused_start_leaves_no_folder_and_takes_nothing_from_a_run_that_was_there(tmp_path: Path) -> None:
    new, old = tmp_path / "runs" / "new", tmp_path / "runs" / "old"
    with holding_run(old):
        pass
    for folder in (new, old):
        with pytest.raises(CommandError, match="a port is taken"), holding_run(folder):
            raise CommandError("a port is taken")
    assert not new.exists() and (old / LOCK).exists()


def test_a_run_that_ends_by_itself_prints_the_command_that_starts_the_same_nodes_again_from_any_folder(
    var_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = var_dir / "runs" / "one"
    folder.mkdir(parents=True)
    monkeypatch.chdir(var_dir)
    note_run(configured(), Layout(1, 31_460, 31_470, config=Path("node.toml")), 3)
    monkeypatch.chdir(folder)
    ProgressView(configured(), ["alpha"], 3, 1.0)._close([], complete=True)
    said = capsys.readouterr().out
    assert f"swarm up --run one --nodes 1 --config {var_dir}/node.toml --nats-port 31460 --base-port 31470 --steps 6  " in said
    (folder / NOTE).unlink()
    ProgressView(configured(), ["alpha"], 3, 1.0)._close([], complete=True)
    assert "swarm up --run one, with the options that it was started with" in capsys.readouterr().out


def test_a_view_that_is_started_again_counts_from_the_start_of_the_run(var_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = var_dir / "runs" / "one"
    with holding_run(folder):
        an_hour_ago = time.time() - 3600
        os.utime(folder / LOCK, (an_hour_ago, an_hour_ago))
        view = ProgressView(configured(), ["alpha"], 3, 1.0)
        view._close([], complete=True)
    (minutes,) = re.findall(r"steps, (\d+)\.\d minutes after this start", capsys.readouterr().out)
    assert 60 <= int(minutes) < 120
    # Where no `swarm up` holds the run, as with honcho, the view begins with it.
    assert time.time() - ProgressView(configured(), ["alpha"], 3, 1.0)._since < 3000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists open files there")
@pytest.mark.parametrize("words", ["status --run {}", "top --once --run {}", "rollouts --run {}", "plot {}"])
def test_an_ended_run_of_another_folder_is_named_with_the_folder_if_it_can_be_known_and_else_with_the_remedy(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SWARM_NODE__VAR_DIR", "SWARM_NATS__NODE_URL"):
        monkeypatch.delenv(variable, raising=False)
    name = f"ended-{os.getpid()}"
    there = tmp_path / "there" / "var"
    (there / "runs" / name).mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def told() -> str:
        result = CliRunner().invoke(app, words.format(name).split())
        assert isinstance(result.exception, CommandError)
        return str(result.exception)

    assert f"no run '{name}' in {tmp_path}/here/var/runs: there are none" in told()
    remedy = (
        "Runs are looked for in var/ of the current folder; for one that was started in FOLDER, set SWARM_NODE__VAR_DIR=FOLDER/var"
    )
    assert remedy in told()
    with holding_run(there / "runs" / f"another-{name}"):
        assert f"It is in {there}: set SWARM_NODE__VAR_DIR={there}" in told()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists open files there")
def test_who_looks_from_another_folder_is_told_what_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / f"elsewhere-{os.getpid()}"
    monkeypatch.setattr(sys, "argv", ["swarm", "status"])
    monkeypatch.setattr(target, "_RUNS_NAMED", 1000)  # other tests run swarms too
    with holding_run(folder):
        write_note(folder, RunNote("nats://127.0.0.1:4555", "none", StartOptions()))
        found = [run for run in running_elsewhere() if folder.name in run]
        assert found == [f"Run {folder.name} is running in {tmp_path}: --node-url nats://127.0.0.1:4555"]
        assert "is running in" in _where_to_look("status", NotConnected("no answer"))
    assert not [run for run in running_elsewhere() if folder.name in run]
