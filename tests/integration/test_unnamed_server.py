"""Commands that were given no server, in a folder without a run, while somebody's server answers at
the usual address: what shows says whose it is, what acts refuses.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swarm_cli import node_commands
from swarm_cli.app import app
from swarm_cli.chosen_config import C, load_chosen
from swarm_cli.errors import CommandError
from swarm_cli.local.control import holding_run
from swarm_cli.nats import backup
from swarm_cli.nats import commands as nats_commands
from swarm_cli.observe import status, top
from swarm_cli.runs import EXIT_ENDED, VAR_DIR_VARIABLE, RunNote, StartOptions, write_end, write_note
from tests.integration.page_swarm import PageSwarm
from tests.nats_server import NatsServer

ACTS = [
    ("ban", "beta", "--by", "alpha"),
    ("unban", "beta", "--by", "alpha"),
    ("nats", "init", "--plane", "both"),
]
SHOWS = [("ban", "--by", "alpha"), ("dlq", "list", "--node", "alpha"), ("status",), ("top", "--once")]


@pytest.fixture
def usual(server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server with node alpha. Replaced: the usual address, by this server's, as its port may be
    another's on the machine that runs the tests.
    """
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(VAR_DIR_VARIABLE, str(tmp_path / "var"))

    def at_this_server(config: Path | None, kind: type[C]) -> C:
        chosen = load_chosen(config, kind)
        if "node_url" not in chosen.nats.model_fields_set:
            nats = chosen.nats.model_copy(update={"node_url": server.url, "swarm_url": server.url})
            nats.__pydantic_fields_set__.difference_update({"node_url", "swarm_url"})
            chosen = chosen.model_copy(update={"nats": nats})
        return chosen

    for module in (node_commands, nats_commands, backup, status, top):
        monkeypatch.setattr(module, "load_chosen", at_this_server)

    async def enter() -> None:
        swarm = await PageSwarm.open(server.url)
        await swarm.node("alpha")
        await swarm.transport.close()

    asyncio.run(enter())
    return server.url


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", ACTS, ids=" ".join)
def test_what_changes_something_refuses_a_server_that_nobody_named(usual: str, command: tuple[str, ...]) -> None:
    refused = run(*command)
    assert isinstance(refused.exception, CommandError), refused.output
    assert "--node-url" in str(refused.exception) and not refused.stdout


@pytest.mark.parametrize("command", SHOWS, ids=" ".join)
def test_what_shows_a_server_that_nobody_named_says_so(usual: str, command: tuple[str, ...]) -> None:
    shown = run(*command)
    assert shown.exit_code == 0, shown.output
    assert usual in shown.stderr and "no run is running in this folder" in shown.stderr
    named = run(*command, "--node-url", usual)
    assert named.exit_code == 0 and named.stderr == ""


def test_an_ended_run_of_this_folder_is_shown_rather_than_a_server_that_nobody_named(usual: str, tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / "mine"
    (folder / "gamma").mkdir(parents=True)
    (folder / "gamma" / "trainer.log").touch()
    write_note(folder, RunNote("nats://127.0.0.1:1", "none", StartOptions()))
    write_end(folder, 0, "progress")
    shown = run("status")
    assert shown.exit_code == EXIT_ENDED and "run mine ended in order at" in shown.stderr, shown.output
    assert "gamma" in shown.stdout and "alpha" not in shown.stdout and "swarm up --run mine" in shown.stderr
    assert "gamma" in run("top", "--once").stdout
    assert "alpha" in run("status", "--node-url", usual).stdout
    served = tmp_path / "var" / "runs" / "honcho"
    served.mkdir()
    (served / f"nats-server_{os.getpid()}.ports").touch()
    assert "alpha" in run("status").stdout, "`honcho start` runs here"


def test_a_run_of_this_folder_is_meant_without_being_named(usual: str, tmp_path: Path) -> None:
    folder = tmp_path / "var" / "runs" / "mine"
    with holding_run(folder):
        write_note(folder, RunNote(usual, usual, StartOptions()))
        banned = run("ban", "beta", "--by", "alpha")
        assert (banned.exit_code, banned.stderr) == (0, "")
        assert "banned beta" in run("ban", "--by", "alpha").stdout
        assert run("status").stderr == ""


def test_restoring_refuses_a_server_that_nobody_named(usual: str, tmp_path: Path) -> None:
    kept = tmp_path / "backup"
    taken = run("nats", "backup", "--out", str(kept))
    assert taken.exit_code == 0 and f"{usual} answers" in taken.stderr, taken.output
    refused = run("nats", "restore", str(kept))
    assert isinstance(refused.exception, CommandError) and "--node-url" in str(refused.exception)
