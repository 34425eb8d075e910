"""Runs a pod's container as kubelet does: starts it, asks its probes as written, ends it with its
hook, SIGTERM and grace.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.k8s.images import Stage, image_name
from tests.k8s.manifests import Object
from tests.k8s.pod_network import PodNetwork
from tests.k8s.pods import Pod, Volumes, command_of, environment_of
from tests.k8s.rootfs import root_of

INIT = Path(__file__).with_name("container_init.py")


@dataclass(frozen=True)
class Ended:
    """How a container ended after it was asked to. `code` above 128: by that signal less 128."""

    code: int
    seconds: float
    killed: bool


@dataclass
class Running:
    """A container that was started."""

    pod: Pod
    address: str
    process: subprocess.Popen[bytes]
    log: Path
    pid_file: Path
    environment: dict[str, str]
    network: PodNetwork
    started_at: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    """Until the startup probe succeeded."""
    ready: bool = False
    complaints: list[str] = field(default_factory=list)
    """What would have made kubelet restart it."""
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def pid(self) -> int:
        """Of the container's first process, as this machine counts."""
        return int(self.pid_file.read_text())

    def words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def watch(self) -> None:
        """Probe it from a thread until it is stopped: the startup probe first, then readiness and
        liveness beside each other.
        """
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        startup = self.pod.container.get("startupProbe")
        if startup and not self._started(startup):
            return
        self.started_s = time.monotonic() - self.started_at
        self.ready = "readinessProbe" not in self.pod.container
        for kind in {"readinessProbe", "livenessProbe"} & self.pod.container.keys():
            threading.Thread(target=self._repeat, args=(kind, self.pod.container[kind]), daemon=True).start()

    def _started(self, probe: Object) -> bool:
        self.stopping.wait(probe.get("initialDelaySeconds", 0))
        for _ in range(probe.get("failureThreshold", 3)):
            if self.stopping.is_set() or self.process.poll() is not None:
                return False
            if self.ask(probe):
                return True
            self.stopping.wait(probe.get("periodSeconds", 10))
        self.complaints.append("the startup probe failed too often")
        return False

    def _repeat(self, kind: str, probe: Object) -> None:
        failures = 0
        while not self.stopping.wait(probe.get("initialDelaySeconds", 0)):
            answered = self.ask(probe)
            failures = 0 if answered else failures + 1
            if kind == "readinessProbe" and (answered or failures >= probe.get("failureThreshold", 3)):
                self.ready = answered
            if kind == "livenessProbe" and failures >= probe.get("failureThreshold", 3) and not self.stopping.is_set():
                self.complaints.append("the liveness probe failed too often")
                return
            if self.stopping.wait(probe.get("periodSeconds", 10)):
                return

    def ask(self, probe: Object) -> bool:
        """One probe, as it is written."""
        assert "httpGet" in probe, f"{self.pod.name}: a probe that this does not know: {probe}"
        try:
            status, _ = self.get(probe["httpGet"]["path"], probe["httpGet"]["port"], probe.get("timeoutSeconds", 1))
        except (OSError, http.client.HTTPException):
            return False
        return 200 <= status < 400

    def get(self, path: str, port: str | int, timeout_s: float = 5.0) -> tuple[int, str]:
        """A page of the container, at the pod's address."""

        def fetch() -> tuple[int, str]:
            connection = http.client.HTTPConnection(self.address, self.pod.port(port), timeout=timeout_s)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            finally:
                connection.close()

        return self.network.inside(self.pod.name, fetch)

    def execute(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as its user."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd=/"]
        user = self.pod.spec["securityContext"]
        as_user = [f"--setuid={user['runAsUser']}", f"--setgid={user['runAsGroup']}"]
        return subprocess.run(
            [*enter, *as_user, *command], env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def stop(self) -> Ended:
        """The hook, then SIGTERM, then SIGKILL when the grace period, which began with the hook, is
        over.
        """
        self.stopping.set()
        began = time.monotonic()
        if self.pod.pre_stop:
            done = self.execute(self.pod.pre_stop, self.pod.grace_s)
            assert done.returncode == 0, f"{self.pod.name}: the preStop hook failed: {done.stdout}{done.stderr}"
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        killed = False
        try:
            self.process.wait(max(0.0, self.pod.grace_s - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            killed = True
            self.kill()
        return Ended(self.process.returncode, time.monotonic() - began, killed)

    def kill(self) -> None:
        """End it at once, with every process in it."""
        self.stopping.set()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


class Kubelet:
    """Starts pods in one folder and one network."""

    def __init__(
        self, folder: Path, network: PodNetwork, objects: tuple[Object, ...], stages: dict[str, Stage], images: dict[str, Stage]
    ) -> None:
        self._folder = folder
        self._network = network
        self._objects = objects
        self._stages = stages
        self._images = images
        self._volumes = Volumes(folder / "volumes", objects)

    def start(self, pod: Pod, address: str, hosts: str) -> Running:
        """Start the pod's container; its output goes to a file."""
        image = self._images[image_name(pod.container["image"])]
        folder = self._folder / pod.name
        while folder.exists():  # a container that ended, and is started again
            folder = folder.with_name(folder.name + "-again")
        (folder / "root").mkdir(parents=True)
        environment = environment_of(pod, self._objects, image)
        spec = folder / "spec.json"
        spec.write_text(json.dumps(self._spec(pod, image, folder, environment, hosts)))
        log = folder / "log"
        command = ["ip", "netns", "exec", self._network.namespace(pod.name), sys.executable, str(INIT), str(spec)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={})
        return Running(pod, address, process, log, folder / "pid", environment, self._network)

    def _spec(self, pod: Pod, image: Stage, folder: Path, environment: dict[str, str], hosts: str) -> dict[str, Any]:
        user = {**pod.spec.get("securityContext", {}), **pod.container.get("securityContext", {})}
        assert user["runAsNonRoot"] and user["runAsUser"] != 0
        root = root_of(image, self._stages, folder)
        root["files"]["/etc/hosts"] = hosts
        binds, memory = self._volumes.mounts(pod)
        mounted = {target for target, _ in memory}
        return {
            **root,
            "binds": [*root["binds"], *binds],
            "tmpfs": [*([] if "/dev/shm" in mounted else [["/dev/shm", "64M"]]), *memory],
            "root": str(folder / "root"),
            "pid_file": str(folder / "pid"),
            "hostname": pod.name,
            "read_only_root": user["readOnlyRootFilesystem"],
            "workdir": pod.container.get("workingDir", image.workdir),
            "environment": environment,
            "command": command_of(pod.container, image),
            "uid": user["runAsUser"],
            "gid": user["runAsGroup"],
            "groups": [user["fsGroup"]],
        }
