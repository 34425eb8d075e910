"""A small kubelet: pods that the cluster bound to fake machines run as processes on this one, and
what becomes of them is reported as their status.

Containers, probes, hooks and ends are those of `tests.k8s.kubelet`, a pod's lives those of
`tests.cluster.lives`; this says which pods there are, what each is told of the others, and lets
them go: those that are deleted within the grace that was given with it, those that are gone from
the cluster at once. As with a kubelet, a pod waits for the Secrets and ConfigMaps that it names and
for a volume that one machine mounts while a pod of another machine has it.

Not as with a kubelet: all machines are this one, with one network, in which a pod has the address
that the one of its name had before; names lead to servers that are not ready too; limits are not
enforced; a mounted ConfigMap stays what it was when the container started.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.api import Api, ApiError
from tests.cluster.lives import Life
from tests.cluster.machines import references
from tests.k8s.images import by_image, read_stages
from tests.k8s.kubelet import LEAST_GRACE_S, Ended, Kubelet, Running
from tests.k8s.manifests import REPOSITORY
from tests.k8s.pod_network import PodNetwork
from tests.k8s.pods import Pod, Volumes, hosts

SERVER = "nats"
"""The only pods that others connect to: their addresses are known before they start."""
FORGOTTEN_S = 60.0

Object = dict[str, Any]


class Left(NamedTuple):
    """A pod that was told to leave and did."""

    pod: str
    role: str
    machine: str
    ended: Ended


class ClaimedVolumes:
    """The folders of claims' volumes. A volume goes with its claim, as a storage class with the
    reclaim policy Delete has it: a claim made again under the same name begins with an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uids: dict[str, str] = {}

    def path(self, claim: str) -> Path:
        return self._folder / f"claim-{claim}"

    def keep(self, claims: Iterable[Object]) -> None:
        """Delete the volumes of all claims known before that are not among these."""
        here = {each["metadata"]["name"]: each["metadata"]["uid"] for each in claims}
        for name, uid in self._uids.items():
            if here.get(name) != uid:
                shutil.rmtree(self.path(name), ignore_errors=True)
        self._uids = here


class Processes:
    """Runs pods of one namespace in one network. `run` is called with each pod again and again."""

    def __init__(self, api: Api, namespace: str, folder: Path, prefix: str) -> None:
        self._api = api
        self._namespace = namespace
        self._folder = folder
        self._stages = read_stages(REPOSITORY / "Dockerfile")
        self._network = PodNetwork(prefix)
        self._volumes = ClaimedVolumes(folder / "volumes")
        self._addresses: dict[str, str] = {}
        self._lives: dict[str, Life] = {}
        self._secrets: dict[str, str] = {}
        """Version of each Secret as the pods have it."""
        self.left: list[Left] = []
        """In the order in which they ended."""

    def container(self, pod: str, name: str = "") -> Running:
        """A container of the pod of that name; without its name the pod's first, or the init
        container that runs before it.
        """
        life = next(each for each in self._lives.values() if each.pod.name == pod)
        return life.named(name) if name else life.container

    def all(self) -> list[Running]:
        """Every container."""
        return [container for each in list(self._lives.values()) for container in each.running()]

    def claimed(self, claim: str) -> Path:
        """Return what is on a claim's volume."""
        return self._volumes.path(claim)

    def run(self, pod: Object) -> None:
        """Bring a pod on: start it, restart it, report of it, or let it go."""
        metadata = pod["metadata"]
        life = self._lives.get(metadata["uid"])
        if "deletionTimestamp" in metadata:
            self._let_go(metadata["uid"], life, float(metadata.get("deletionGracePeriodSeconds", 0)), metadata["name"])
        elif life is None:
            if (new := self._start(pod)) is not None:
                self._lives[metadata["uid"]] = new
        else:
            life.look()
            status = life.status(self._addresses[life.pod.name])
            if status != life.reported:
                self._api.patch("Pod", life.pod.name, {"status": status}, self._namespace, part="status")
                life.reported = status

    def gone(self, uids: set[str]) -> None:
        """End what runs of pods that the cluster has no more. `uids`: of those that it has."""
        for uid, life in list(self._lives.items()):
            if uid not in uids:
                self._let_go(uid, life, LEAST_GRACE_S, life.pod.name)
        self._volumes.keep(self._api.listed("PersistentVolumeClaim", self._namespace))
        self._renew_secrets()

    def _renew_secrets(self) -> None:
        """Where one has changed."""
        listed = self._api.listed("Secret", self._namespace)
        versions = {each["metadata"]["name"]: each["metadata"]["resourceVersion"] for each in listed}
        if versions == self._secrets:
            return
        volumes = Volumes(self._folder / "volumes", tuple({**each, "kind": "Secret"} for each in listed))
        for life in self._lives.values():
            if life.leaving is None:
                volumes.renew_secrets(life.pod)
        self._secrets = versions

    def close(self) -> None:
        for each in self._lives.values():
            each.kill()
        self._network.close()

    def _start(self, given: Object) -> Life | None:
        """None while it waits: for what it mounts, or for servers to have addresses."""
        spec, metadata = given["spec"], given["metadata"]
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in spec.get("volumes", [])
            if "persistentVolumeClaim" in volume
        }
        missing = [name for kind, name in references(spec) if self._api.get(kind, name, self._namespace) is None]
        if missing or self._held_elsewhere(set(claims.values()), spec["nodeName"]) or not self._servers():
            return None
        self._volumes.keep(self._api.listed("PersistentVolumeClaim", self._namespace))
        labels = metadata["labels"]
        pod = Pod(metadata["name"], labels["app.kubernetes.io/component"], labels, spec, claims)
        self._address(pod.name)
        return Life(pod, spec["nodeName"], frozenset(claims.values()), self._begin)

    def _held_elsewhere(self, claims: set[str], machine: str) -> bool:
        """Return whether a pod of another machine has one of the claims that only one may have."""
        held = {claim for life in self._lives.values() if life.machine != machine for claim in life.claims}
        found = [self._api.get("PersistentVolumeClaim", claim, self._namespace) for claim in claims & held]
        return any(each is not None and "ReadWriteMany" not in each["spec"]["accessModes"] for each in found)

    def _begin(self, pod: Pod) -> Running:
        """A container, with ConfigMaps as they are now."""
        objects = tuple(
            {**each, "kind": kind}
            for kind in ("ConfigMap", "Secret", "PersistentVolumeClaim")
            for each in self._api.listed(kind, self._namespace)
        )
        services = tuple({**each, "kind": "Service"} for each in self._api.listed("Service", self._namespace))
        servers = self._servers()
        names = hosts(servers, services)
        if pod.name not in servers:
            names += f"{self._address(pod.name)} {pod.name}\n"
        kubelet = Kubelet(self._folder, self._network, objects, self._stages, by_image(self._stages))
        return kubelet.start(pod, self._address(pod.name), names)

    def _servers(self) -> dict[str, tuple[Pod, str]]:
        """Every server that there will be, by name, with its address."""
        found = {}
        for each in self._api.listed("StatefulSet", self._namespace):
            template = each["spec"]["template"]
            labels = template["metadata"]["labels"]
            if labels["app.kubernetes.io/component"] == SERVER:
                for ordinal in range(each["spec"]["replicas"]):
                    name = f"{each['metadata']['name']}-{ordinal}"
                    found[name] = Pod(name, SERVER, labels, template["spec"], {}), self._address(name)
        return found

    def _address(self, pod: str) -> str:
        if pod not in self._addresses:
            self._addresses[pod] = self._network.add_pod(pod)
        return self._addresses[pod]

    def _let_go(self, uid: str, life: Life | None, grace_s: float, name: str) -> None:
        """In a thread, as it may take as long as the grace period; once."""
        if life is None:
            self._forget(uid, name)
        elif life.leaving is None:
            life.leaving = threading.Thread(target=self._leave, args=(uid, life, grace_s), daemon=True)
            life.leaving.start()

    def _leave(self, uid: str, life: Life, grace_s: float) -> None:
        """End the pod, drop its empty folders, say so: only then may another have its volumes."""
        self.left.append(Left(life.pod.name, life.pod.role, life.machine, life.end(grace_s)))
        for folder in (self._folder / "volumes").glob(f"{life.pod.name}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        deadline = time.monotonic() + FORGOTTEN_S
        while not self._forget(uid, life.pod.name) and time.monotonic() < deadline:
            time.sleep(0.3)
        self._lives.pop(uid, None)

    def _forget(self, uid: str, name: str) -> bool:
        """The last word of a kubelet on a pod; False when the server did not hear it."""
        try:
            self._api.delete("Pod", name, self._namespace, grace_s=0, uid=uid)
        except (OSError, ApiError):
            return False
        return True
