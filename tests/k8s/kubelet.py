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
LEAST_GRACE_S = 2.0
"""What kubelet leaves between SIGTERM and SIGKILL when the hook took all of the grace period."""
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PROBE_FIELDS = {"httpGet", "initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold", "failureThreshold"}
STARTING_S = 120.0


@dataclass(frozen=True)
class Ended:
    """How a container ended after it was asked to. `code` above 128: by that signal less 128."""

    code: int
    seconds: float
    killed: bool
    hook_problem: str | None = None
    """Why the preStop hook failed, which kubelet reports and then goes on."""


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

    def _has_begun(self) -> bool:
        """Return whether its first process is in its root already, which it enters before it takes
        its user.
        """
        try:
            return Path(f"/proc/{self.pid}").stat().st_uid != 0
        except (OSError, ValueError):  # it is not there yet, or has not told its number
            return False

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
        failures = successes = 0
        self.stopping.wait(probe.get("initialDelaySeconds", 0))
        while not self.stopping.is_set():
            answered = self.ask(probe)
            failures, successes = (0, successes + 1) if answered else (failures + 1, 0)
            if successes >= probe.get("successThreshold", 1) or failures >= probe.get("failureThreshold", 3):
                self.ready = answered if kind == "readinessProbe" else self.ready
            if kind == "livenessProbe" and failures >= probe.get("failureThreshold", 3) and not self.stopping.is_set():
                self.complaints.append("the liveness probe failed too often")
                return
            if self.stopping.wait(probe.get("periodSeconds", 10)):
                return

    def ask(self, probe: Object) -> bool:
        """One probe, as it is written."""
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
        """Run a command in the container, as its user, once it has begun."""
        deadline = time.monotonic() + STARTING_S
        while not self._has_begun() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd=/"]
        user = self.pod.spec["securityContext"]
        as_user = [f"--setuid={user['runAsUser']}", f"--setgid={user['runAsGroup']}"]
        return subprocess.run(
            [*enter, *as_user, *command], env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def stop(self, grace_s: float | None = None) -> Ended:
        """The hook, then SIGTERM, then SIGKILL when the grace period, which began with the hook, is
        over. `grace_s`: whoever deleted the pod may have said another than the pod does.
        """
        grace = self.pod.grace_s if grace_s is None else grace_s
        self.stopping.set()
        began = time.monotonic()
        runs = self.process.poll() is None
        problem = self._hook(grace) if runs and self.pod.pre_stop and grace > 0 else None
        self._terminate()
        killed = False
        try:
            self.process.wait(max(LEAST_GRACE_S, grace - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            killed = True
            self.kill()
        return Ended(self.process.returncode, time.monotonic() - began, killed, problem)

    def _hook(self, grace_s: float) -> str | None:
        """Run the preStop hook; why it failed. One that takes too long is left alone: it ends with
        its container.
        """
        try:
            done = self.execute(self.pod.pre_stop, grace_s)
        except subprocess.TimeoutExpired:
            return f"it took longer than the grace period of {grace_s:g} s"
        except (OSError, ValueError) as error:  # the container is ending, or only beginning
            return repr(error)
        return f"it ended with {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else None

    def _terminate(self) -> None:
        """SIGTERM to its first process, whose number a container that only begins has not told
        yet.
        """
        deadline = time.monotonic() + STARTING_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                os.kill(self.pid, signal.SIGTERM)
                return
            except ProcessLookupError:
                return
            except (OSError, ValueError):
                time.sleep(0.05)

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
        """Start the pod's container; its output goes to a file. AssertionError where the pod has
        something that this does not know.
        """
        for kind in PROBES:
            _check_probe(pod, pod.container.get(kind, {"httpGet": {}}))
        image = self._images[image_name(pod.container["image"])]
        folder = self._folder / f"{pod.name}-{pod.container['name']}"
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
            "process_ids": pod.process_ids,
            "hostname": pod.name,
            "read_only_root": user["readOnlyRootFilesystem"],
            "workdir": pod.container.get("workingDir", image.workdir),
            "environment": environment,
            "command": command_of(pod.container, image),
            "uid": user["runAsUser"],
            "gid": user["runAsGroup"],
            "groups": [user["fsGroup"]],
        }


def _check_probe(pod: Pod, probe: Object) -> None:
    """Refuse a probe that would not be asked as it is written."""
    get = probe.get("httpGet", {"scheme": "none"})
    known = set(probe) <= PROBE_FIELDS and set(get) <= {"path", "port", "scheme"} and get.get("scheme", "HTTP") == "HTTP"
    assert known, f"{pod.name}: a probe that this does not know: {probe}"
