"""A control plane of the tests' own: etcd, API server, controllers and scheduler on free loopback
ports, with certificates and a token made for it, ended with it.
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.nats_server import free_port
from tests.secured_server import make_certificates

STARTED_S = 180.0
"""For the API server to be ready, on a machine that does much else."""
ENDED_S = 20.0
LEFT_OUT = "TTLAfterFinished=true"
"""Gates of 1.20 for what is on in every version that the manifests name."""


@dataclass
class _Program:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class ControlPlane:
    """Programs of a folder (`scripts/control-plane`), with their data in another."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._running: list[_Program] = []
        self.kubeconfig = folder / "kubeconfig"

    def start(self) -> ControlPlane:
        """All four; returns when the API server is ready."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        """etcd first, then the API server, then what talks to it."""
        client, peer, secure = free_port(), free_port(), free_port()
        authority, certificate, key = make_certificates(self._folder / "tls")
        token = secrets.token_hex(24)
        tokens = self._folder / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f"{token},tests,tests,system:masters\n")
        self._write_kubeconfig(secure, authority, token)
        etcd, peers = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self._run(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={secure}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={certificate}",
            # There is no endpoint of the API server for pods, and nobody who would ask it.
            "--endpoint-reconciler-type=none",
            f"--feature-gates={LEFT_OUT}",
        )
        self._until_ready(f"https://127.0.0.1:{secure}/readyz", authority, token)
        shared = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0", "--bind-address=127.0.0.1")
        self._run(
            "kube-controller-manager",
            *shared,
            f"--secure-port={free_port()}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={authority}",
            f"--feature-gates={LEFT_OUT}",
        )
        self._run("kube-scheduler", *shared, f"--secure-port={free_port()}")

    def _run(self, name: str, *arguments: str) -> None:
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(self._programs / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                env={**os.environ, **({"ETCD_UNSUPPORTED_ARCH": "arm64"} if os.uname().machine == "aarch64" else {})},
            )
        self._running.append(_Program(name, process, log))

    def _write_kubeconfig(self, port: int, authority: Path, token: str) -> None:
        self.kubeconfig.touch(mode=0o600)
        cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(authority)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "tests", "user": {"token": token}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
            "current-context": "tests",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def _until_ready(self, url: str, authority: Path, token: str) -> None:
        context = ssl.create_default_context(cafile=str(authority))
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        deadline = time.monotonic() + STARTED_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5, context=context):
                    return
            except (OSError, urllib.error.URLError) as error:
                self.check()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the API server is not ready: {error}\n{self._running[-1].words()}") from None
                time.sleep(0.2)

    def check(self) -> None:
        """Raises RuntimeError with a program's last words if it ended."""
        for program in self._running:
            if program.process.poll() is not None:
                raise RuntimeError(f"{program.name} ended with {program.process.returncode}:\n{program.words()}")

    def stop(self) -> None:
        """The last started first, so that nobody logs that its server is gone."""
        for program in reversed(self._running):
            program.process.terminate()
            try:
                program.process.wait(ENDED_S)
            except subprocess.TimeoutExpired:
                program.process.kill()
                program.process.wait(ENDED_S)
        self._running.clear()
