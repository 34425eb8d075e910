"""What `swarm join` says if a port of the new node is taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_cli.errors import CommandError
from swarm_cli.join.command import prepare
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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_on_the_hubs_machine_nobody_is_told_to_stop_the_hub(
    host: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = said(f"nats://{host}:{taken}", taken, tmp_path, monkeypatch)
    assert f"port {taken} is that of the hub itself (nats://{host}:{taken})" in message and NUMBERS in message
    assert "stop those processes" not in message


@pytest.mark.parametrize("url", ["nats://192.0.2.10:{port}", "nats://127.0.0.1:1"], ids=["another machine", "another port"])
def test_a_port_that_another_process_has_is_told_with_numbers_to_take_instead(
    url: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = said(url.format(port=taken), taken, tmp_path, monkeypatch)
    assert f"stop those processes, or {NUMBERS}" in message and "hub" not in message
