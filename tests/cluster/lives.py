"""One pod's containers, one life after the other, as a kubelet has them: init containers first,
restarts with a growing pause, a container whose probe fails ended and started again; and what of
that it reports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.cluster.machines import now
from tests.k8s.kubelet import Ended, Running
from tests.k8s.pods import Pod

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
Object = dict[str, Any]


@dataclass
class BackOff:
    """kubelet's pause before a restart: none at first, then 10 s, twice as long each time up to
    five minutes, and none again after a life of ten minutes.
    """

    pause_s: float = FIRST_PAUSE_S
    restarted_at: float | None = None

    def restart_at(self, ended_at: float) -> float:
        """When a container that ended then is started again."""
        return ended_at if self._fresh(ended_at) else ended_at + self.pause_s

    def restarted(self, ended_at: float, at: float) -> None:
        """It was, at that time."""
        self.pause_s = FIRST_PAUSE_S if self._fresh(ended_at) else min(LONGEST_PAUSE_S, 2 * self.pause_s)
        self.restarted_at = at

    def _fresh(self, ended_at: float) -> bool:
        return self.restarted_at is None or ended_at - self.restarted_at > 2 * LONGEST_PAUSE_S


@dataclass
class _Container:
    """One container of the pod, alone in a Pod that has nothing else."""

    pod: Pod
    init: bool
    running: Running | None = None
    began: str = ""
    restarts: int = 0
    ended_at: float | None = None
    """None while it runs."""
    last: Object | None = None
    """How it ended last, as it is reported."""
    back_off: BackOff = field(default_factory=BackOff)

    def reported(self) -> Object:
        """As kubelet writes it, without what nobody here reads."""
        ran = self.running is not None
        ends = self.ended_at is not None
        state: Object = {"running": {"startedAt": self.began}}
        if not ran:
            state = {"waiting": {"reason": "PodInitializing"}}
        elif ends and self.last and self.last["exitCode"] == 0 and self.init:
            state = {"terminated": self.last}
        elif ends:
            state = {"waiting": {"reason": "CrashLoopBackOff"}}
        image = self.pod.container["image"]
        return {
            "name": self.pod.container["name"],
            "image": image,
            "imageID": image,
            "ready": self.ready,
            "started": ran and not ends and self.running.started_s is not None,  # type: ignore[union-attr]
            "restartCount": self.restarts,
            "lastState": {"terminated": self.last} if self.last and self.restarts else {},
            "state": state,
        }

    @property
    def ready(self) -> bool:
        """An init container is when it is done."""
        if self.init:
            return self.done
        return self.running is not None and self.ended_at is None and self.running.ready

    @property
    def done(self) -> bool:
        return self.ended_at is not None and self.last is not None and self.last["exitCode"] == 0


class Life:
    """One pod. `begin` starts the only container of the Pod that it is given."""

    def __init__(self, pod: Pod, machine: str, claims: frozenset[str], begin: Callable[[Pod], Running]) -> None:
        assert pod.spec.get("restartPolicy", "Always") == "Always", f"{pod.name}: a pod that ends by itself is not run here"
        self.pod = pod
        self.machine = machine
        self.claims = claims
        self.leaving: threading.Thread | None = None
        self.reported: Object | None = None
        self._begin = begin
        self._began = now()
        alone = {key: value for key, value in pod.spec.items() if key not in ("initContainers", "containers")}
        self._containers = [
            _Container(replace(pod, spec={**alone, "containers": [container]}), init)
            for init, listed in ((True, pod.spec.get("initContainers", [])), (False, pod.spec["containers"]))
            for container in listed
        ]
        assert sum(not each.init for each in self._containers) == 1, f"{pod.name}: more than one container is not run here"
        self.look()

    @property
    def container(self) -> Running:
        """The newest one."""
        return next(each.running for each in reversed(self._containers) if each.running is not None)

    def look(self) -> None:
        """Bring it on: the next container, a restart, or the end of one whose probe failed."""
        current = next((each for each in self._containers if not (each.init and each.done)), self._containers[-1])
        running = current.running
        if running is None:
            self._start(current)
            return
        code = running.process.poll()
        if code is None:
            if running.complaints and not running.stopping.is_set():
                running.stopping.set()
                threading.Thread(target=running.stop, daemon=True).start()
            return
        if current.ended_at is None:
            running.stopping.set()
            current.ended_at = time.monotonic()
            reason = "Completed" if code == 0 else "Error"
            current.last = {"exitCode": code, "reason": reason, "startedAt": current.began, "finishedAt": now()}
        if not (current.init and code == 0) and time.monotonic() >= current.back_off.restart_at(current.ended_at):
            current.back_off.restarted(current.ended_at, time.monotonic())
            current.restarts += 1
            self._start(current)

    def _start(self, container: _Container) -> None:
        container.running = self._begin(container.pod)
        container.began, container.ended_at = now(), None
        if not container.init:
            container.running.watch()

    def end(self, grace_s: float) -> Ended:
        """End the container that runs; one that ran no more ends as it did."""
        return self.container.stop(grace_s)

    def status(self, address: str) -> Object:
        """As kubelet writes it."""
        main, inits = self._containers[-1], self._containers[:-1]
        before = {each["type"]: each for each in (self.reported or {}).get("conditions", [])}
        conditions = []
        holds = {"Initialized": all(each.done for each in inits), "Ready": main.ready, "ContainersReady": main.ready}
        for kind, value in {**holds, "PodScheduled": True}.items():
            same = kind in before and before[kind]["status"] == str(value)
            since = before[kind]["lastTransitionTime"] if same else now()
            conditions.append({"type": kind, "status": str(value), "lastTransitionTime": since})
        return {
            "phase": "Pending" if main.running is None else "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": self._began,
            "conditions": conditions,
            "initContainerStatuses": [each.reported() for each in inits],
            "containerStatuses": [main.reported()],
        }
