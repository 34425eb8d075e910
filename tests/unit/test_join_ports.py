"""What `swarm join` says if a port of the new node is taken."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.invitation import write_token
from swarm_cli.join.command import prepare
from swarm_cli.local.control import holding_run
from tests.nats_server import free_port
from tests.unit.test_invitation import invitation

NUMBERS = "choose other ports with --nats-port 4333 --base-port 9500"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine that is listened on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def said(url: str, port: int, var_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(var_dir))
    newcomer = prepare(invitation(url=url), nats_port=port)
    with pytest.raises(CommandError) as refused:
        newcomer.run(port, None, 0)
    return str(refused.value)


def test_a_taken_port_is_told_with_numbers_to_take_instead_and_nobody_is_told_to_stop_the_hub(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = said(f"nats://127.0.0.1:{taken}", taken, tmp_path, monkeypatch)
    assert f"port {taken}, needed for" in message and NUMBERS in message and "stop" not in message


@pytest.mark.slow
def test_a_check_tells_a_taken_port_in_the_words_in_which_the_join_refuses_it(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"nats://127.0.0.1:{taken}"
    refusal = said(url, taken, tmp_path, monkeypatch)
    result = CliRunner().invoke(app, ["join", "--check", "--nats-port", str(taken), write_token(invitation(url=url))])
    assert isinstance(result.exception, CommandError) and "ports" in str(result.exception)
    assert "NO  ports" in result.stdout and "all is well" not in result.stdout
    assert " ".join(refusal.split()) in " ".join(result.stdout.split())
    assert not list((tmp_path / "runs").iterdir())


def test_a_check_tells_that_the_node_runs_already_in_the_words_of_the_join(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    newcomer = prepare(invitation(), nats_port=taken)
    with holding_run(tmp_path / "runs" / newcomer.config.node.run):
        (finding,) = newcomer.look_at_ports(taken, None)
        with pytest.raises(CommandError) as refused:
            newcomer.run(taken, None, 0)
    assert finding.ok is False and finding.told == str(refused.value) and "is running already (process " in finding.told


def test_a_check_finds_free_ports_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    deadline = time.monotonic() + 120
    while True:  # another process may take one of them meanwhile
        nats, base = free_port(), free_port()
        (finding,) = prepare(invitation(), nats_port=nats).look_at_ports(nats, base)
        if finding.ok or time.monotonic() > deadline:
            break
    assert finding.ok and f"{base}, {base + 1}, {base + 2}, {base + 3}" in finding.told and str(nats) in finding.told
