"""Fake machines: Node objects with a size, kept Ready by heartbeats, on which pods run by word
alone and volumes are wherever their pod is.

Scheduling, controllers and disruption budgets are the cluster's own; only what a kubelet and a
storage driver report is made up, and that as they report it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.cluster.api import Api, ApiError
from tests.cluster.conversions import FAKE

LOOK_EVERY_S = 0.3
HEARTBEAT_S = 8.0
STORAGE = "fake-machines"
"""The storage class whose driver this is, with volumes that stay on their machine: the cluster's
default where it has none.
"""
MOVABLE = "fake-network"
"""The other class: a volume is wherever its pod is, on one machine at a time."""
CLASSES = (STORAGE, MOVABLE)
LEASES = "kube-node-lease"

Object = dict[str, Any]
Why = Callable[[Object], str | None]


@dataclass(frozen=True)
class Machine:
    """One fake machine. `memory_gib` and the rest can all be asked for by pods."""

    name: str
    cpus: int = 32
    memory_gib: int = 256
    gpus: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()
    """Keys, each with the effect NoSchedule."""


class Machines:
    """Every fake machine of a cluster. `apart`: the cluster has others, so these are marked and
    keep everybody else's pods away.
    """

    def __init__(self, api: Api, *, apart: bool) -> None:
        self._api = api
        self._apart = apart
        self._named: dict[str, Machine] = {}
        self._beaten_at = 0.0
        self._seen_at: dict[str, float] = {}
        self._addresses = 0
        self.why_not_ready: Why = lambda pod: None
        """Says of a pod why it fails, None of one that does well."""
        self.ready_after_s = 0.5
        self.run: Callable[[Object], None] = self.by_word
        """Brings one pod on; called with each again and again."""
        self.gone: Callable[[set[str]], None] = lambda uids: None
        """Told each time which pods there are, by their uid."""
        self.problems: list[str] = []
        """What went wrong in the thread, which no test would see otherwise."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def add(self, *machines: Machine) -> None:
        for machine in machines:
            self._api.create(self._node(machine))
            self._api.patch("Node", machine.name, {"status": _node_status(machine)}, part="status")
            self._named[machine.name] = machine
        self._beaten_at = 0.0

    def remove_all(self) -> None:
        names, self._named = list(self._named), {}
        for name in names:
            self._api.delete("Node", name)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(30)
        self.remove_all()

    def _node(self, machine: Machine) -> Object:
        arch = {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
        apart = {FAKE: "true"} if self._apart else {}
        taints = [*machine.taints, *apart]
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": machine.name,
                "labels": {"kubernetes.io/hostname": machine.name, **arch, **apart, **machine.labels},
            },
            "spec": {"taints": [{"key": key, "value": "true", "effect": "NoSchedule"} for key in taints]},
        }

    def _work(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                self._beat()
                self._provide_volumes()
                pods = self._api.listed("Pod")
                for pod in pods:
                    if pod["spec"].get("nodeName") in self._named:
                        self.run(pod)
                self.gone({pod["metadata"]["uid"] for pod in pods})
            except (OSError, ApiError) as error:
                # Somebody else was faster, or the server is busy: the next look sees what is.
                if not (isinstance(error, ApiError) and error.code in (404, 409)):
                    self.problems.append(repr(error))
            except Exception:
                self.problems.append(traceback.format_exc())

    def _beat(self) -> None:
        """Renew each machine's lease, without which it counts as lost after 40 s."""
        if time.monotonic() - self._beaten_at < HEARTBEAT_S:
            return
        self._beaten_at = time.monotonic()
        for name in list(self._named):
            renewed = {"spec": {"renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}
            try:
                self._api.patch("Lease", name, renewed, LEASES)
            except ApiError:
                lease = {"metadata": {"name": name, "namespace": LEASES}, "spec": {**renewed["spec"], "holderIdentity": name}}
                self._api.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease})

    def _provide_volumes(self) -> None:
        """A volume for each claim whose pod has a machine; one of `STORAGE` that a single machine
        mounts stays with it.
        """
        for claim in self._api.listed("PersistentVolumeClaim"):
            metadata, spec = claim["metadata"], claim["spec"]
            chosen = metadata.get("annotations", {}).get("volume.kubernetes.io/selected-node")
            if spec.get("storageClassName") not in CLASSES or spec.get("volumeName") or chosen not in self._named:
                continue
            local = spec["storageClassName"] == STORAGE and "ReadWriteMany" not in spec["accessModes"]
            here = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [chosen]}]}
            volume: Object = {
                "storageClassName": spec["storageClassName"],
                "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                "accessModes": spec["accessModes"],
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {key: metadata[key] for key in ("name", "namespace", "uid")},
                "hostPath": {"path": f"/nowhere/{metadata['uid']}"},
            }
            if local:
                volume["nodeAffinity"] = {"required": {"nodeSelectorTerms": [here]}}
            name = f"fake-{metadata['uid']}"
            self._api.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume})
        for volume in self._api.listed("PersistentVolume"):
            if volume["spec"].get("storageClassName") in CLASSES and volume["status"].get("phase") == "Released":
                self._api.delete("PersistentVolume", volume["metadata"]["name"])

    def by_word(self, pod: Object) -> None:
        """Report of a pod what a kubelet would by now."""
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            self._api.delete("Pod", metadata["name"], metadata["namespace"], grace_s=0)
            return
        began = self._seen_at.setdefault(metadata["uid"], time.monotonic())
        status = pod.get("status", {})
        if status.get("phase") in ("Succeeded", "Failed") or self.missing(pod):
            return
        why = self.why_not_ready(pod)
        ready = time.monotonic() - began >= self.ready_after_s and why is None
        ends = pod["spec"].get("restartPolicy", "Always") != "Always"
        phase = "Succeeded" if ready and ends else "Running"
        as_reported = (status.get("phase"), _is_ready(pod), status.get("message"))
        if as_reported == (phase, ready and not ends, why):
            return
        if not status.get("podIP"):
            self._addresses += 1
        address = status.get("podIP") or f"10.200.{self._addresses // 250}.{self._addresses % 250 + 1}"
        change = {"status": _pod_status(pod, phase, ready, why, address)}
        self._api.patch("Pod", metadata["name"], change, metadata["namespace"], part="status")

    def missing(self, pod: Object) -> list[str]:
        """Return what a kubelet would wait for before it starts the pod: `Secret alpha-signing`."""
        namespace = pod["metadata"]["namespace"]
        return [f"{kind} {name}" for kind, name in references(pod["spec"]) if self._api.get(kind, name, namespace) is None]


def references(pod: Object) -> list[tuple[str, str]]:
    """Secrets, ConfigMaps and claims that a pod's start needs, as kind and name."""
    found = []
    for volume in pod.get("volumes", []):
        if "secret" in volume and not volume["secret"].get("optional"):
            found.append(("Secret", volume["secret"]["secretName"]))
        if "configMap" in volume and not volume["configMap"].get("optional"):
            found.append(("ConfigMap", volume["configMap"]["name"]))
        for source in volume.get("projected", {}).get("sources", []):
            found += [
                (kind, source[key]["name"]) for kind, key in (("Secret", "secret"), ("ConfigMap", "configMap")) if key in source
            ]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        for source in [*container.get("envFrom", []), *(entry.get("valueFrom", {}) for entry in container.get("env", []))]:
            for kind, keys in (("ConfigMap", ("configMapRef", "configMapKeyRef")), ("Secret", ("secretRef", "secretKeyRef"))):
                found += [(kind, source[key]["name"]) for key in keys if key in source and not source[key].get("optional")]
    return list(dict.fromkeys(found))


def _is_ready(pod: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod.get("status", {}).get("conditions", []))


def now() -> str:
    """As the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _pod_status(pod: Object, phase: str, ready: bool, why: str | None, address: str) -> Object:
    """As a kubelet writes it. `why`: the pod's last words, None when it does well."""
    done = phase == "Succeeded"
    state: Object = {"running": {"startedAt": now()}}
    if done:
        state = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now(), "finishedAt": now()}}
    elif why is not None:
        state = {"waiting": {"reason": "CrashLoopBackOff", "message": why}}
    conditions = {"Initialized": True, "Ready": ready and not done, "ContainersReady": ready and not done, "PodScheduled": True}
    containers = [
        {
            "name": container["name"],
            "image": container["image"],
            "imageID": container["image"],
            "ready": ready and not done,
            "started": why is None,
            "restartCount": 0 if why is None else 1,
            "state": state,
        }
        for container in pod["spec"]["containers"]
    ]
    return {
        "phase": phase,
        "message": why,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": pod["status"].get("startTime") or now(),
        "conditions": [
            {"type": kind, "status": "True" if holds else "False", "lastTransitionTime": now()}
            for kind, holds in conditions.items()
        ],
        "containerStatuses": containers,
    }


def _node_status(machine: Machine) -> Object:
    room = {"cpu": str(machine.cpus), "memory": f"{machine.memory_gib}Gi", "pods": "110", "ephemeral-storage": "1Ti"}
    if machine.gpus:
        room["nvidia.com/gpu"] = str(machine.gpus)
    well = {"status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now(), "lastTransitionTime": now()}
    calm = [
        {**well, "type": kind, "status": "False", "reason": "Enough"} for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ]
    return {"capacity": room, "allocatable": room, "conditions": [{**well, "type": "Ready"}, *calm]}
