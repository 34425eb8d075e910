"""Whatever answers where a NATS server's monitoring port should be: each who asks has a value or a
sentence soon, and takes little of it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shared.transport.base import TransportError
from swarm_cli import server_diagnosis
from swarm_cli.nats import beside_server
from tests.nats_server import NatsServer, free_port

SOON_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@contextmanager
def serving(first: bytes, again: bytes = b"", pause_s: float = 0.0) -> Iterator[str]:
    """A port that sends `first` to whoever asks, and then `again` without end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send(line: socket.socket) -> None:
            with line, suppress(OSError):
                line.recv(4096)
                line.sendall(first)
                while again:
                    line.sendall(again)
                    time.sleep(pause_s)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=send, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_diagnosis, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(beside_server, "ANSWER_S", 0.5)


def nobody_is_told_anything_by(url: str) -> str:
    """Why not."""
    began = time.monotonic()
    assert beside_server.certificate_ends([url]) == {}
    with pytest.raises(TransportError) as refused:
        server_diagnosis.health(url)
    problem = str(refused.value)
    assert problem and problem.isprintable() and time.monotonic() - began < SOON_S
    return problem


@pytest.mark.parametrize(
    ("first", "again", "told"),
    [
        (b"INFO " + b"{}" * 500 + b"\r\n", b"", "not the monitoring port"),
        (b"SSH-2.0-\x1b[2J\r\n", b"", "SSH-2.0-"),
        (b"", b"", "closed"),
        (HEAD + b"[" * 100_000, b"", "cannot be read"),
        (HEAD + b"[]", b"", "cannot be read"),
        (HEAD + b"{}", b"", "cannot be read"),
        (HEAD + b'{"server_name": 1, "tls_cert_not_after": [], "meta_cluster": 1}', b"", "cannot be read"),
        pytest.param(HEAD, b" " * 2**20, "more than 16 MiB", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_monitoring_port_is_told_in_a_sentence(first: bytes, again: bytes, told: str) -> None:
    with serving(first, again) as url:
        assert told in nobody_is_told_anything_by(url)


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nX: ", HEAD, b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"])
def test_an_answer_that_drips_is_given_up_in_time(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for asking, limit in ((server_diagnosis, "TIMEOUT_S"), (beside_server, "ANSWER_S")):
        monkeypatch.setattr(asking, limit, 0.2)
    with serving(first, b" ", pause_s=0.05) as url:
        assert "timed out" in nobody_is_told_anything_by(url)


def test_the_clients_port_is_told_apart_from_the_monitoring_port(tmp_path: Path) -> None:
    server = NatsServer(tmp_path).start()
    try:
        assert "not the monitoring port" in nobody_is_told_anything_by(f"http://127.0.0.1:{server.port}")
    finally:
        server.kill()


@pytest.mark.parametrize("url", ["nats-0:8222", "http://[::1", "http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://"])
def test_an_address_that_is_none_is_a_sentence(url: str) -> None:
    nobody_is_told_anything_by(url)


def test_an_address_may_end_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_diagnosis, "TIMEOUT_S", SOON_S)
    port = free_port()
    server = NatsServer(tmp_path, config=f'server_name: hub\nhttp: "127.0.0.1:{port}"').start()
    try:
        for url in (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/"):
            assert server_diagnosis.health(url)[0] == "ok"
    finally:
        server.kill()
