"""A rendered overlay, and what its pods need. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swarm_cli.k8s.check.quantity import quantity

Object = Mapping[str, Any]
NODE_LABEL = "swarm-rl.dev/node"
Use = Literal["volume", "variable", "pull"]
"""What a pod uses an object for: files, its environment, or to pull its images."""
_POD_MAKERS = {"Deployment", "StatefulSet", "DaemonSet", "Job", "ReplicaSet", "LeaderWorkerSet", "CronJob"}


@dataclass(frozen=True, slots=True)
class Reference:
    """A Secret or ConfigMap that a pod cannot start without."""

    kind: str
    name: str
    keys: frozenset[str]
    """The entries that the pod picks; empty: all of them."""
    use: Use = "volume"


@dataclass(frozen=True, slots=True)
class Workload:
    """The pods made from one template."""

    kind: str
    name: str
    replicas: int
    pod: Object
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def containers(self) -> list[Object]:
        """All containers, including init containers."""
        return [*self.pod.get("initContainers", []), *self.pod.get("containers", [])]

    def requests(self) -> dict[str, float]:
        """The resources that a machine reserves for one pod: the sum over its containers, or those
        of the largest init container if they are more. A limit without a request counts as a
        request.
        """
        running: Counter[str] = Counter()
        for container in self.pod.get("containers", []):
            running.update(_requests(container))
        before = [_requests(container) for container in self.pod.get("initContainers", [])]
        return {
            name: max([running[name], *(each.get(name, 0.0) for each in before)])
            for name in {*running, *(n for b in before for n in b)}
        }

    def alone_on_a_machine(self) -> bool:
        """Whether two of its pods must not be on one machine."""
        terms = self.pod.get("affinity", {}).get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
        return any(term.get("topologyKey") == "kubernetes.io/hostname" for term in terms)


@dataclass(frozen=True, slots=True)
class Claim:
    """A request for a volume."""

    name: str
    storage_class: str | None
    """None: the cluster's default."""
    access_modes: tuple[str, ...]
    storage: float
    copies: int = 1
    workload: str = ""
    """The StatefulSet that this is a template of; empty if it is none's."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """The objects of a rendered overlay."""

    objects: Sequence[Object]

    @property
    def namespace(self) -> str:
        """The namespace of its pods."""
        named = [each["metadata"].get("namespace") for each in self.objects if each["kind"] in _POD_MAKERS]
        return next(filter(None, named), "default")

    def nodes(self) -> list[str]:
        """The names of its nodes."""
        return sorted({name for each in self.workloads() if (name := str(each.labels.get(NODE_LABEL, "")))})

    def with_kind(self, kind: str) -> list[Object]:
        """Objects of one kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def workloads(self) -> list[Workload]:
        """All objects that make pods."""
        return [_workload(each) for each in self.objects if each["kind"] in _POD_MAKERS]

    def references(self) -> dict[Reference, list[str]]:
        """The Secrets and ConfigMaps that pods use but the overlay lacks, each with its
        workloads.
        """
        return self._references(here=False)

    def own_references(self) -> dict[Reference, list[str]]:
        """The overlay's Secrets and ConfigMaps that its pods use, each with its workloads."""
        return self._references(here=True)

    def _references(self, *, here: bool) -> dict[Reference, list[str]]:
        own = {(each["kind"], each["metadata"]["name"]) for each in self.objects}
        found: dict[Reference, list[str]] = {}
        for workload in self.workloads():
            for each in _references(workload):
                if ((each.kind, each.name) in own) == here:
                    found.setdefault(each, []).append(workload.name)
        return found

    def claims(self) -> list[Claim]:
        """Claims of the overlay and of its StatefulSets' templates."""
        found = [_claim(each["metadata"]["name"], each["spec"]) for each in self.with_kind("PersistentVolumeClaim")]
        for each in self.with_kind("StatefulSet"):
            name, copies = each["metadata"]["name"], each["spec"].get("replicas", 1)
            templates = each["spec"].get("volumeClaimTemplates", [])
            found += [_claim(f"{each['metadata']['name']}-{name}", each["spec"], copies, name) for each in templates]
        return found


def _workload(each: Object) -> Workload:
    spec = each["spec"]
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    replicas = spec.get("replicas", 1) * spec.get("leaderWorkerTemplate", {}).get("size", 1)
    return Workload(each["kind"], each["metadata"]["name"], replicas, template["spec"], each["metadata"].get("labels") or {})


def _requests(container: Object) -> dict[str, float]:
    resources = container.get("resources", {})
    return {name: quantity(amount) for name, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items()}


def _references(workload: Workload) -> Iterator[Reference]:
    """References from volumes, projected volumes and the environment, without optional ones."""
    for volume in workload.pod.get("volumes", []):
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            for field_name, kind in (("secret", "Secret"), ("configMap", "ConfigMap")):
                said = source.get(field_name)
                if said and not said.get("optional"):
                    keys = frozenset(item["key"] for item in said.get("items", []))
                    yield Reference(kind, said.get("secretName") or said["name"], keys)
    for container in workload.containers:
        for source in container.get("envFrom", []):
            for field_name, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                if (said := source.get(field_name)) and not said.get("optional"):
                    yield Reference(kind, said["name"], frozenset(), "variable")
        for entry in container.get("env", []):
            for field_name, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                said = entry.get("valueFrom", {}).get(field_name)
                if said and not said.get("optional"):
                    yield Reference(kind, said["name"], frozenset({said["key"]}), "variable")
    for each in workload.pod.get("imagePullSecrets", []):
        yield Reference("Secret", each["name"], frozenset(), "pull")


def _claim(name: str, spec: Object, copies: int = 1, workload: str = "") -> Claim:
    storage = quantity(spec["resources"]["requests"]["storage"])
    return Claim(name, spec.get("storageClassName"), tuple(spec["accessModes"]), storage, copies, workload)
