"""Errors of files and connections are told in words, without the system's numbers."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.identity.keys import KeyFileError, SigningKey, create, load_or_create, new_seed
from shared.identity.roster import RosterError, read_roster
from shared.text import error_text
from shared.transport.base import AccessDenied, NotConnected
from shared.transport.connect import connect
from swarm_cli.app import app
from swarm_cli.asked_tasks import task_sources
from swarm_cli.errors import CommandError


def test_words_have_no_number_and_no_name_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as missing:
        (tmp_path / "none").read_text()
    assert error_text(missing.value) == "No such file or directory"
    (tmp_path / "latin").write_bytes(b"ab\xff")
    with pytest.raises(UnicodeDecodeError) as latin:
        (tmp_path / "latin").read_text(encoding="utf-8")
    assert error_text(latin.value) == "it is not text in UTF-8, see byte 3"
    assert error_text(ValueError("as it is")) == "as it is"
    assert error_text(TimeoutError()) == "TimeoutError"
    assert error_text(FileExistsError("x: holds other files")) == "x: holds other files"


async def test_what_asyncio_says_of_one_address_or_several_is_in_words_too() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        with pytest.raises(OSError) as refused:
            await asyncio.open_connection("127.0.0.1", closed.getsockname()[1])
    assert error_text(refused.value) == "Connection refused"
    several = OSError(f"Multiple exceptions: {refused.value}, {refused.value}")
    assert error_text(several) == "Connection refused"


@pytest.mark.slow
def test_commands_tell_files_that_cannot_be_used_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "inside"

    def told(error: type[Exception], do: Any, *arguments: Any) -> str:
        with pytest.raises(error) as caught:
            do(*arguments)
        return str(caught.value)

    def of_command(*arguments: str) -> str:
        error = CliRunner().invoke(app, arguments).exception
        assert isinstance(error, CommandError), error
        return str(error)

    said = [
        told(KeyFileError, load_or_create, inside / "key"),
        told(KeyFileError, create, inside / "key"),
        told(RosterError, read_roster, tmp_path),
        told(CommandError, task_sources, str(tmp_path / "none.toml")),
        of_command("k8s", "check", str(tmp_path / "none.yaml")),
        of_command("invite", "--url", "tls://127.0.0.1:1", "--ca", str(tmp_path / "none.pem")),
        of_command("roster", "add", "nova", SigningKey(new_seed()).public_key, "--file", str(inside)),
        of_command("experiment", "model", str(tmp_path / "none.toml")),
    ]
    for each in said:
        assert str(tmp_path) in each and not re.search(r"Errno|Traceback", each), each
        assert re.search(r"[:,)] .*(correct|give|make|let|create|check)", each), f"no remedy: {each}"


async def test_a_server_that_is_not_there_and_an_authority_that_is_no_file_are_in_words(tmp_path: Path) -> None:
    with pytest.raises(AccessDenied) as authority:
        await connect("tls://127.0.0.1:1", name="x", timeout_s=1, ca_file=str(tmp_path / "none.pem"))
    with pytest.raises(NotConnected) as away:
        await connect("nats://127.0.0.1:1", name="x", timeout_s=1)
    assert "Errno" not in f"{authority.value} {away.value}" and "No such file" in str(authority.value)
