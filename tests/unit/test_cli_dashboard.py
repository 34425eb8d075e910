"""`swarm dashboard`: what its server answers to whom, and what it says when it cannot start."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from swarm_cli.dashboard.server import FILES, PAGE, PageServer
from swarm_cli.errors import CommandError
from swarm_cli.local.procfile import check_ports
from swarm_cli.server_diagnosis import monitor_of
from tests.nats_server import find_binary


def test_a_server_s_monitoring_address_is_read_from_its_own_note_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, gift = tmp_path / "runs" / "own", tmp_path / "runs" / "gift"
    for run in (own, gift):
        run.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    command = [find_binary(), "-a", "127.0.0.1", "-p", "-1", "-m", "-1", "--ports_file_dir", "runs/own"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 120
            while not list(own.glob("*.ports")) or not (note := next(own.glob("*.ports")).read_text()).endswith("}"):
                assert time.monotonic() < deadline, "it starts"
                time.sleep(0.02)
            told = json.loads(note)
            url, monitor = told["nats"][0], told["monitoring"][0]
            port = int(url.rpartition(":")[2])
            forged = f'{{"nats":["nats://127.0.0.1:{port}"],"monitoring":["http://127.0.0.1:1"]}}'
            for number in (7, server.pid, os.getpid()):
                (gift / f"nats-server_{number}.ports").write_text(forged)
            (own / "nats-server_7.ports").write_text(forged)
            (own / "nats-server_x.ports").write_text(forged)
            (own / "nats-server_8.ports").write_text('{"nats":')
            (own / "nats-server_9.ports").write_text('{"nats":' + "[" * 60_000)
            os.mkfifo(own / "nats-server_10.ports")
            assert monitor_of(f"nats://localhost:{port}", tmp_path) == monitor
            assert monitor_of(f"nats://localhost:{port ^ 1}", tmp_path) is None
            next(own.glob(f"*_{server.pid}.ports")).write_text(
                json.dumps(told | {"monitoring": ["http://example.org:1", "file:///x"]})
            )
            assert monitor_of(url, tmp_path) is None, "it is not on this machine"
        finally:
            server.kill()


def test_a_taken_port_is_named_with_its_purpose_and_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=rf"(?s)port {port}, needed for the page.*--port"):
            check_ports({port: "the page"}, "choose another with --port")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for name, _ in FILES.values():
        text = (PAGE / name).read_text()
        loaded = re.findall(r"""(?:src|href|import|fetch|url)\s*[=(]\s*["'`]?(https?:)?//""", text)
        assert not loaded, f"{name} loads something from another host"
    assert {path.name for path in PAGE.iterdir()} == {name for name, _ in FILES.values()}


def nothing_known(path: str, query: Mapping[str, str]) -> None:
    """Answers nothing about a swarm."""


@pytest.mark.slow
def test_the_page_is_served_to_this_machine_alone() -> None:
    server = PageServer(0, nothing_known)
    try:
        with urllib.request.urlopen(server.url, timeout=5) as answer:
            assert b"swarm.js" in answer.read()
        host, port = server.url.removeprefix("http://").rstrip("/").split(":")
        for path, name, status_code in (
            ("/api/v1/query?query=up", f"localhost:{port}", 404),
            ("/swarm.json", f"localhost:{port}", 404),
            ("/swarm.css", f"localhost:{port}", 200),
            ("/../dashboard.py", f"localhost:{port}", 404),
            ("/", f"elsewhere.example:{port}", 403),
        ):
            connection = http.client.HTTPConnection(host, int(port), timeout=5)
            connection.request("GET", path, headers={"Host": name})
            assert (path, connection.getresponse().status) == (path, status_code)
            connection.close()
    finally:
        server.close()


def test_an_address_that_is_not_ascii_is_refused_and_a_browser_that_goes_away_is_no_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = PageServer(0, reset_by_peer)
    host, port = server.url.removeprefix("http://").rstrip("/").split(":")
    try:
        for path in (b"/\xe9", b"/node.json?node=\xe9", b"/swarm.json"):
            with socket.create_connection((host, int(port)), timeout=5) as line:
                line.sendall(b"GET " + path + b" HTTP/1.0\r\nHost: localhost:1\r\n\r\n")
                answer = line.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 400 ") if b"\xe9" in path else answer == b""
    finally:
        server.close()
    assert "Traceback" not in capfd.readouterr().err


def reset_by_peer(path: str, query: Mapping[str, str]) -> None:
    raise ConnectionResetError


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Dest": "script"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}, 200),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Dest": "document"}, 200),
        ({}, 200),
    ],
)
def test_another_sites_page_has_a_browser_ask_for_nothing(headers: dict[str, str], status: int) -> None:
    """As a picture it could not read a group, but have one after the other read here."""
    asked = []

    def ask(path: str, query: Mapping[str, str]) -> tuple[int, bytes]:
        asked.append(path)
        return 200, b"{}"

    server = PageServer(0, ask)
    try:
        line = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2].strip("/")), timeout=5)
        line.request("GET", "/group.json?node=alpha&step=1&place=0", headers=headers)
        assert line.getresponse().status == status and len(asked) == (status == 200)
        line.close()
    finally:
        server.close()
