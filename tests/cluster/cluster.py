"""A cluster under test: `KUBECONFIG`'s, or a control plane of the tests' own. Overlays are applied
to it by kubectl, as a person does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from tests.cluster.api import Api, Object
from tests.cluster.conversions import for_server, kept_to_fake_machines
from tests.cluster.machines import CLASSES, STORAGE, Machines, references
from tests.k8s.manifests import containers, name_of, pod_of, with_kind, workloads

NAMESPACE = "swarm"
WAIT_S = 120.0
KUBECTL_S = 180.0


class Cluster:
    """Machines, and what is applied to them. `own`: started by the tests, with nothing else on
    it.
    """

    def __init__(self, api: Api, kubectl: list[str], *, own: bool) -> None:
        self.api = api
        self.own = own
        self.notes: set[str] = set()
        self.version = str(api.ask("GET", "version")["gitVersion"])
        self.minor = int(self.version.split(".")[1])
        self._kubectl = kubectl
        for name in CLASSES:
            default = {"storageclass.kubernetes.io/is-default-class": "true"} if own and name == STORAGE else {}
            api.create(
                {
                    "apiVersion": "storage.k8s.io/v1",
                    "kind": "StorageClass",
                    "metadata": {"name": name, "annotations": default},
                    "provisioner": f"swarm-rl.dev/{name}",
                    "volumeBindingMode": "WaitForFirstConsumer",
                    "reclaimPolicy": "Retain",
                }
            )
        self.machines = Machines(api, apart=not own)

    def close(self) -> None:
        self.clear()
        self.machines.close()
        for name in CLASSES:
            self.api.delete("StorageClass", name)

    def kubectl(self, *arguments: str, given: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl; `given` is its standard input."""
        done = subprocess.run(
            [*self._kubectl, *arguments], input=given, capture_output=True, text=True, timeout=KUBECTL_S, check=False
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    def environment(self) -> dict[str, str]:
        """For a command that asks the cluster by a kubectl of its own."""
        kubectl, config = self._kubectl
        return os.environ | {"KUBECONFIG": config.partition("=")[2], "PATH": f"{Path(kubectl).parent}:{os.environ['PATH']}"}

    def apply(
        self, objects: Iterable[Object], *, check: bool = True, without: Collection[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """`kubectl apply` of an overlay's objects, as this server and its machines can take them.
        Secrets and ConfigMaps that their pods name and a person makes are made first, those in
        `without` not.
        """
        objects, notes = for_server(objects, self.api.versions(), self.minor)
        self.notes |= set(notes)
        if not self.own:
            objects = kept_to_fake_machines(objects)
            _with_storage(objects)
        namespaces = with_kind(objects, "Namespace")
        self.kubectl("apply", "--filename=-", given=_documents(namespaces))
        for each in _by_hand(objects):
            if name_of(each) not in without:
                self.api.create(each)
        return self.kubectl("apply", "--filename=-", given=_documents(objects), check=check)

    def pods(self, **labels: str) -> list[Object]:
        """Pods of the swarm that are not on their way out. `labels`: `component="nats"`,
        `node="alpha"`.
        """
        keys = {"component": "app.kubernetes.io/component", "node": "swarm-rl.dev/node"}
        found = self.api.listed("Pod", NAMESPACE, {keys[name]: value for name, value in labels.items()})
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def until(self, holds: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        """Wait until `holds` says so. Fails with what the cluster says of its pods."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert not self.machines.problems, self.machines.problems
            assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}\n{self.state()}"
            time.sleep(0.3)

    def until_all_ready(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Wait until so many pods are there, each ready or finished, and no more."""

        def holds() -> bool:
            pods = self.pods()
            return len(pods) == count and all(is_ready(pod) or pod["status"].get("phase") == "Succeeded" for pod in pods)

        self.until(holds, f"{count} pods are ready", timeout_s)

    def state(self) -> str:
        """Pods, where they are, what they wait for, and what the cluster complained of."""
        lines = []
        for pod in self.api.listed("Pod", NAMESPACE):
            scheduled = [each for each in pod["status"].get("conditions", []) if each["type"] == "PodScheduled"]
            why = scheduled[0].get("message", "") if scheduled else "not seen by the scheduler"
            missing = ", ".join(self.machines.missing(pod))
            where = pod["spec"].get("nodeName", "-")
            lines.append(f"{pod['metadata']['name']} {pod['status'].get('phase')} ready={is_ready(pod)} on {where} {why} {missing}")
        events = [each for each in self.api.listed("Event", NAMESPACE) if each.get("type") == "Warning"]
        return "\n".join([*lines, *(f"{each['involvedObject'].get('name')}: {each['message']}" for each in events[-30:])])

    def warnings(self) -> list[str]:
        events = self.api.listed("Event", NAMESPACE)
        return [str(each["message"]) for each in events if each.get("type") == "Warning"]

    def clear(self) -> None:
        """Remove the swarm and its machines: the next test begins with neither."""
        for name in [each["metadata"]["name"] for each in self.api.listed("PriorityClass")]:
            if name.startswith("swarm-"):
                self.api.delete("PriorityClass", name)
        # A namespace whose pods leave one by one is looked at again after half their grace period.
        for kind in ("Deployment", "StatefulSet", "Job", "ReplicaSet", "Pod"):
            self.api.delete_all(kind, NAMESPACE)
        self.api.delete("Namespace", NAMESPACE)
        self.machines.why_not_ready = lambda pod: None
        self.until(lambda: self.api.get("Namespace", NAMESPACE) is None, "the namespace is gone")
        self.until(lambda: not self._volumes(), "its volumes are gone")
        self.machines.remove_all()

    def _volumes(self) -> list[Object]:
        return [each for each in self.api.listed("PersistentVolume") if each["spec"].get("storageClassName") in CLASSES]


def find_kubectl(programs: Path | None) -> str | None:
    """The one on the PATH, else that of the tests' own control plane."""
    beside = programs / "kubectl" if programs else None
    return shutil.which("kubectl") or (str(beside) if beside and beside.exists() else None)


def is_ready(pod: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


def machine_of(pod: Object) -> str:
    return str(pod["spec"].get("nodeName", ""))


def component_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"].get("app.kubernetes.io/component"))


def pods_expected(objects: Iterable[Object]) -> int:
    """Count the pods that the workloads make when all is well."""
    return sum(workload["spec"].get("replicas", 1) for workload in workloads(objects))


def gpus_of(workload: Object) -> int:
    return sum(int(each["resources"].get("limits", {}).get("nvidia.com/gpu", 0)) for each in containers(workload))


def _documents(objects: list[Object]) -> str:
    """As `kubectl apply --kustomize` has them: one after the other."""
    return "\n".join(json.dumps(each) for each in objects)


def _by_hand(objects: list[Object]) -> list[Object]:
    """Return what pods mount and no manifest makes: keys, certificates, the roster."""
    made = {(each["kind"], name_of(each)) for each in objects}
    wanted = {each for workload in workloads(objects) for each in references(pod_of(workload))} - made
    return [
        {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {"name": name, "namespace": NAMESPACE},
            **({"stringData": {"node.nk": "a key"}} if kind == "Secret" else {"data": {"file": "a file"}}),
        }
        for kind, name in sorted(wanted)
    ]


def _with_storage(objects: list[Object]) -> None:
    """Another cluster's default class has no volumes for machines that are not there."""
    claims = [each["spec"] for each in with_kind(objects, "PersistentVolumeClaim")]
    claims += [
        claim["spec"] for each in with_kind(objects, "StatefulSet") for claim in each["spec"].get("volumeClaimTemplates", [])
    ]
    for claim in claims:
        claim.setdefault("storageClassName", STORAGE)


def kubeconfig_of_a_person() -> str | None:
    return os.environ.get("KUBECONFIG") or None
