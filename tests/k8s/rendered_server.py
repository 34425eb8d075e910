"""A NATS server that runs what an overlay renders, on this machine: other ports and folders,
loopback instead of all addresses, all else as rendered.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.k8s.manifests import Object
from tests.k8s.test_nats_config import configuration
from tests.nats_server import find_binary, free_port

START_S = 120.0
PORTS = (4222, 6222, 7422, 8222)


class RenderedServer:
    """One pod of the StatefulSet `nats`."""

    def __init__(self, objects: tuple[Object, ...], folder: Path, name: str = "nats-0") -> None:
        self.folder = folder
        self.name = name
        self.file, self.environment = configuration(objects, folder)
        self.environment |= {"POD_NAME": name, "NATS_MAX_FILE_STORE": "200GB"}
        self.ports = {port: free_port() for port in PORTS}
        self.swaps = {"0.0.0.0": "127.0.0.1"}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.ports[4222]}"

    @property
    def monitor(self) -> str:
        return f"http://127.0.0.1:{self.ports[8222]}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def mount(self, name: str, files: Mapping[str, str]) -> None:
        """A Secret or ConfigMap under /etc, as the kubelet shows it; again for one that changed."""
        (self.folder / "etc" / name).mkdir(exist_ok=True)
        for file, text in files.items():
            self._write(self.folder / "etc" / name / file, text)

    def start(self, *, wait: bool = True) -> RenderedServer:
        """Start; returns when the server takes clients."""
        for path in (self.folder / "etc/nats").iterdir():
            self._write(path, path.read_text())
        with (self.folder / "log").open("ab") as log:
            environment = os.environ | self.environment
            self._process = subprocess.Popen(
                [find_binary(), "--config", str(self.file)], env=environment, stdout=log, stderr=log, cwd=self.folder
            )
        if wait:
            self.wait()
        return self

    def check(self) -> str:
        """Return what nats-server says of the configuration, without starting."""
        for path in (self.folder / "etc/nats").iterdir():
            self._write(path, path.read_text())
        command = [find_binary(), "-t", "--config", str(self.file)]
        return subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, timeout=30, check=False
        ).stderr

    def wait(self) -> None:
        """Until it takes clients."""
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process is not None and self._process.poll() is None and time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.05)

    def reload(self) -> None:
        """As `kubectl exec nats-0 -- nats-server --signal reload=/run/nats/nats.pid` does."""
        before = self.log.count("Reloaded server configuration")
        done = subprocess.run([find_binary(), "--signal", f"reload={self.folder}/run/nats/nats.pid"], timeout=180, check=False)
        assert done.returncode == 0
        deadline = time.monotonic() + START_S
        while self.log.count("Reloaded server configuration") == before:
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.02)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.ports[4222]), 1.0) as connection:
                return connection.recv(5).startswith(b"INFO")
        except OSError:
            return False

    def _write(self, path: Path, text: str) -> None:
        for said, meant in self.swaps.items():
            text = text.replace(said, meant)
        for said_port, port in self.ports.items():
            text = re.sub(rf"(: |:){said_port}$", rf"\g<1>{port}", text, flags=re.MULTILINE)
        # Routes have no host: they listen everywhere, as others of the machine may not reach them.
        path.write_text(re.sub(rf"^  port: {self.ports[6222]}$", r"  host: 127.0.0.1\n\g<0>", text, flags=re.MULTILINE))
