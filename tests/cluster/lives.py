"""One pod's containers, one life after the other, as a kubelet has them: init containers first,
restarts with a growing pause, a container whose probe fails ended and started again; and what of
that it reports.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from tests.cluster.machines import now
from tests.k8s.kubelet import Ended, Running
from tests.k8s.pods import Pod, apart

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
HOLDER_S = 60.0
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


class _ProcessIds:
    """A namespace of process ids for containers that share one (`shareProcessNamespace`), with a
    first process that only waits, as a container runtime has it. What a container leaves behind
    when it ends lives on until the pod ends.
    """

    def __init__(self) -> None:
        # Ended with whoever started it, as containers are.
        with_us = ["setpriv", "--pdeathsig", "KILL"]
        self._holder = subprocess.Popen([*with_us, "unshare", "--pid", "--fork", "--kill-child", "sleep", "infinity"])
        self.file = f"/proc/{self._holder.pid}/ns/pid_for_children"
        deadline = time.monotonic() + HOLDER_S
        while not os.path.exists(self.file):  # until the first process is there
            assert time.monotonic() < deadline, f"no process namespace after {HOLDER_S:.0f} s"
            time.sleep(0.01)

    def end(self) -> None:
        """And every process in it."""
        self._holder.kill()
        self._holder.wait(HOLDER_S)


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
        self._ids = _ProcessIds() if pod.spec.get("shareProcessNamespace") else None
        parts = [replace(each, process_ids=self._ids.file) if self._ids else each for each in apart(pod)]
        first = len(pod.spec.get("initContainers", []))
        self._inits = [_Container(each, init=True) for each in parts[:first]]
        self._mains = [_Container(each, init=False) for each in parts[first:]]
        self.look()

    @property
    def container(self) -> Running:
        """The pod's first container, or before it runs the newest init container."""
        return next(each.running for each in (self._mains[0], *reversed(self._inits)) if each.running is not None)

    def named(self, container: str) -> Running:
        """The container of that name, which runs or has run."""
        return next(each.running for each in self._all() if each.running and each.pod.container["name"] == container)

    def running(self) -> list[Running]:
        """Each container that was started, as it was started last."""
        return [each.running for each in self._all() if each.running is not None]

    def _all(self) -> list[_Container]:
        return [*self._inits, *self._mains]

    def look(self) -> None:
        """Bring it on: the next init container or all others, a restart, or the end of one whose
        probe failed.
        """
        waits_for = next((each for each in self._inits if not each.done), None)
        for each in self._mains if waits_for is None else [waits_for]:
            self._bring_on(each)

    def _bring_on(self, current: _Container) -> None:
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
        """End the containers that run, all at the same time; one that ran no more ends as it did.
        How `container` ended.
        """
        chosen, running = self.container, self.running()
        with ThreadPoolExecutor(len(running)) as beside:
            ends = list(beside.map(lambda each: each.stop(grace_s), running))
        if self._ids is not None:
            self._ids.end()
        return ends[running.index(chosen)]

    def kill(self) -> None:
        """End everything at once."""
        for each in self.running():
            each.kill()
        if self._ids is not None:
            self._ids.end()

    def status(self, address: str) -> Object:
        """As kubelet writes it."""
        ready = all(each.ready for each in self._mains)
        before = {each["type"]: each for each in (self.reported or {}).get("conditions", [])}
        conditions = []
        holds = {"Initialized": all(each.done for each in self._inits), "Ready": ready, "ContainersReady": ready}
        for kind, value in {**holds, "PodScheduled": True}.items():
            same = kind in before and before[kind]["status"] == str(value)
            since = before[kind]["lastTransitionTime"] if same else now()
            conditions.append({"type": kind, "status": str(value), "lastTransitionTime": since})
        return {
            "phase": "Pending" if any(each.running is None for each in self._mains) else "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": self._began,
            "conditions": conditions,
            "initContainerStatuses": [each.reported() for each in self._inits],
            "containerStatuses": [each.reported() for each in self._mains],
        }
