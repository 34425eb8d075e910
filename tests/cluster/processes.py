"""A small kubelet: pods that the cluster bound to a fake machine run as processes on this one, and
what becomes of them is reported as their status.

Containers, probes, hooks and ends are those of `tests.k8s.kubelet`; this adds what a cluster sees:
readiness, restarts with a growing pause, exit codes, and pods that leave when they are told to.
"""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.api import Api, ApiError
from tests.cluster.machines import now
from tests.k8s.images import by_image, read_stages
from tests.k8s.kubelet import Kubelet, Running
from tests.k8s.manifests import REPOSITORY
from tests.k8s.pod_network import PodNetwork
from tests.k8s.pods import Pod, hosts

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
"""Between a container's end and its next start, as kubelet doubles it."""
SERVER = "nats"
"""The only pod that others connect to: its address is known before it starts."""

Object = dict[str, Any]


@dataclass
class _Started:
    """One pod and its container's lives."""

    pod: Pod
    container: Running
    restarts: int = 0
    last_code: int | None = None
    again_at: float = 0.0
    reported: Object | None = None
    leaving: threading.Thread | None = field(default=None)


class Processes:
    """Runs pods of one namespace in one network. `run` is called with each pod again and again."""

    def __init__(self, api: Api, namespace: str, folder: Path, prefix: str) -> None:
        self._api = api
        self._namespace = namespace
        self._folder = folder
        self._stages = read_stages(REPOSITORY / "Dockerfile")
        self._network = PodNetwork(prefix)
        self._addresses: dict[str, str] = {}
        self._started: dict[str, _Started] = {}
        self._server: tuple[Pod, str] | None = None

    def container(self, name: str) -> Running:
        """The newest container of the pod of that name."""
        return next(each.container for each in self._started.values() if each.pod.name == name)

    def all(self) -> list[Running]:
        """The newest container of each pod."""
        return [each.container for each in list(self._started.values())]

    def run(self, pod: Object) -> None:
        """Bring a pod on: start it, restart it, report of it, or let it go."""
        uid, leaves = pod["metadata"]["uid"], "deletionTimestamp" in pod["metadata"]
        started = self._started.get(uid)
        if started is None:
            if leaves:
                self._forget(pod)
            elif (new := self._start(pod)) is not None:
                self._started[uid] = new
            return
        if leaves:
            if started.leaving is None:
                started.leaving = threading.Thread(target=self._leave, args=(pod, started), daemon=True)
                started.leaving.start()
            return
        self._again(started)
        status = self._status(pod, started)
        if status != started.reported:
            self._api.patch("Pod", started.pod.name, {"status": status}, self._namespace, part="status")
            started.reported = status

    def close(self) -> None:
        for each in self._started.values():
            each.container.kill()
        self._network.close()

    def _start(self, given: Object) -> _Started | None:
        """None while the server that everybody names has no address yet."""
        spec, labels = given["spec"], given["metadata"]["labels"]
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in spec.get("volumes", [])
            if "persistentVolumeClaim" in volume
        }
        role = labels["app.kubernetes.io/component"]
        pod = Pod(given["metadata"]["name"], role, labels, spec, claims)
        if role == SERVER:
            self._server = pod, self._address(pod.name)
        if self._server is None:
            return None
        return _Started(pod, self._begin(pod))

    def _begin(self, pod: Pod) -> Running:
        """A container, with ConfigMaps as they are now."""
        assert self._server is not None
        objects = tuple(
            {**each, "kind": kind}
            for kind in ("ConfigMap", "PersistentVolumeClaim")
            for each in self._api.listed(kind, self._namespace)
        )
        services = [{**each, "kind": "Service"} for each in self._api.listed("Service", self._namespace)]
        server, address = self._server
        of_server = tuple(each for each in services if each["spec"]["selector"].items() <= server.labels.items())
        names = hosts({server.name: (server, address)}, of_server)
        if pod.name != server.name:
            names += f"{self._address(pod.name)} {pod.name}\n"
        kubelet = Kubelet(self._folder, self._network, objects, self._stages, by_image(self._stages))
        container = kubelet.start(pod, self._address(pod.name), names)
        container.watch()
        return container

    def _address(self, pod: str) -> str:
        """A StatefulSet's pod has the address that the one of its name had before."""
        if pod not in self._addresses:
            self._addresses[pod] = self._network.add_pod(pod)
        return self._addresses[pod]

    def _again(self, started: _Started) -> None:
        """What kubelet does about a container that ended, or whose liveness probe failed."""
        code = started.container.process.poll()
        if code is None and started.container.complaints:
            started.container.stop()
            code = started.container.process.poll()
        if code is None:
            return
        if not started.again_at:
            started.container.stopping.set()
            started.last_code = code
            started.again_at = time.monotonic() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**started.restarts)
        elif time.monotonic() >= started.again_at:
            started.restarts += 1
            started.again_at = 0.0
            started.container = self._begin(started.pod)

    def _leave(self, pod: Object, started: _Started) -> None:
        started.container.stop()
        self._forget(pod)
        for folder in (self._folder / "volumes").glob(f"{started.pod.name}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _forget(self, pod: Object) -> None:
        try:
            self._api.delete("Pod", pod["metadata"]["name"], self._namespace, grace_s=0)
        except (OSError, ApiError):
            return  # the next look tries again
        self._started.pop(pod["metadata"]["uid"], None)

    def _status(self, pod: Object, started: _Started) -> Object:
        """As kubelet writes it, without what nobody here reads."""
        running = not started.again_at
        ready = running and started.container.ready
        last = {} if started.last_code is None else {"terminated": {"exitCode": started.last_code, "reason": "Error"}}
        began = (started.reported or {}).get("startTime") or now()
        container = {
            "name": started.pod.container["name"],
            "image": started.pod.container["image"],
            "imageID": started.pod.container["image"],
            "ready": ready,
            "started": running and started.container.started_s is not None,
            "restartCount": started.restarts,
            "lastState": last,
            "state": {"running": {"startedAt": began}} if running else {"waiting": {"reason": "CrashLoopBackOff"}},
        }
        before = {each["type"]: each for each in (started.reported or {}).get("conditions", [])}
        conditions = []
        for kind, holds in {"Initialized": True, "Ready": ready, "ContainersReady": ready, "PodScheduled": True}.items():
            same = kind in before and before[kind]["status"] == str(holds)
            conditions.append(
                {"type": kind, "status": str(holds), "lastTransitionTime": before[kind]["lastTransitionTime"] if same else now()}
            )
        address = self._addresses[started.pod.name]
        return {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": began,
            "conditions": conditions,
            "containerStatuses": [container],
        }
