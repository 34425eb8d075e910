"""`swarm nats certificates` and servers or files that are none: a sentence, and soon."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.nats import certificates

SOON_S = 60.0


@pytest.fixture
def answering() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"tls://127.0.0.1:{server.getsockname()[1]}"


def refused(argument: str) -> str:
    done = CliRunner().invoke(app, ["nats", "certificates", argument])
    assert isinstance(done.exception, CommandError), done.exception
    return str(done.exception)


@pytest.mark.parametrize("said", [b"INFO []\r\n", b"INFO 1\r\n", b"INFO " + b"[" * 50_000 + b"\r\n", b"HTTP/1.1 400\r\n", b""])
def test_a_server_that_says_something_else_is_no_nats_server(answering: tuple[socket.socket, str], said: bytes) -> None:
    server, url = answering

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(said)

    threading.Thread(target=answer, daemon=True).start()
    assert "no NATS server answers there" in refused(url)


def test_a_server_that_drips_its_line_is_given_up_in_time(
    answering: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "ANSWER_S", 1.0)
    server, url = answering
    over = threading.Event()

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            while not over.wait(0.1):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    threading.Thread(target=answer, daemon=True).start()
    began = time.monotonic()
    try:
        assert "timed out" in refused(url)
    finally:
        over.set()
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("url", ["tls://127.0.0.1:99999", "tls://[::1", "tls://h:abc"])
def test_an_address_that_is_none_is_a_sentence(url: str) -> None:
    assert "give tls://HOST:PORT" in refused(url)


def test_a_pipe_or_a_device_is_no_file_of_certificates(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        assert f"{file} cannot be read" in refused(str(file))
