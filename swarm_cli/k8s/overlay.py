"""A rendered overlay: what its pods reserve, and the environment, files and probes of its
containers.

Somebody else may have made the YAML: a hundred kilobytes with aliases of aliases stand for more
than any memory holds, so aliases are refused. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from shared.text import visible
from swarm_cli.errors import CommandError

Object = Mapping[str, Any]
NODE_LABEL = "swarm-rl.dev/node"
MAX_CHARS = 16 * 2**20
"""Of rendered YAML. A node takes some twenty thousand."""
_POD_MAKERS = {"Deployment", "StatefulSet", "DaemonSet", "Job", "ReplicaSet", "LeaderWorkerSet", "CronJob"}
_UNKNOWN_URL = "tls://unknown:4222"
"""Stands for an address that a Secret holds."""


_SUFFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIXES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", 1)}


def quantity(text: object) -> float:
    """The value of a quantity of Kubernetes. Raises ValueError for anything else."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTP]?|[KMGTP]i)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    return float(found[1]) * _SUFFIXES[found[2]]


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

    def requests(self) -> Counter[str]:
        """The resources that one pod reserves. A limit without a request counts as a request."""
        total: Counter[str] = Counter()
        for resources in (each.get("resources", {}) for each in self.pod.get("containers", [])):
            asked = {**resources.get("limits", {}), **resources.get("requests", {})}
            total.update({name: quantity(amount) for name, amount in asked.items()})
        return total


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a container, and the object that sets it: `ConfigMap alpha-settings`."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class File:
    """A file that a container sees: an entry of a ConfigMap, and its text. None: the ConfigMap has
    no such entry.
    """

    config_map: str
    entry: str
    text: str | None


@dataclass(frozen=True, slots=True)
class Overlay:
    """The objects of a rendered overlay."""

    objects: Sequence[Object]

    @classmethod
    def parsed(cls, text: str, source: str) -> Overlay:
        """Read rendered YAML. `source`: its name for the user.

        Raises:
            CommandError: it is too large, has aliases, or holds something else than objects.
        """
        remedy = "give what `kubectl kustomize` prints"
        if len(text) > MAX_CHARS:
            raise CommandError(f"{source} has more than {MAX_CHARS:,} characters: {remedy}")
        try:
            objects = [each for each in yaml.load_all(text, Loader=_Loader) if each]  # noqa: S506 (a safe loader)
        except RecursionError:
            raise CommandError(f"{source} is nested too deep: {remedy}") from None
        except yaml.YAMLError as error:
            raise CommandError(f"{source} is not usable YAML ({visible(' '.join(str(error).split()))}): {remedy}") from None
        if not objects or not all(isinstance(each, dict) and {"apiVersion", "kind", "metadata"} <= each.keys() for each in objects):
            raise CommandError(f"{source} does not hold only Kubernetes objects: {remedy}")
        overlay = cls(objects)
        if wrong := [visible(name, 300) for name in overlay._not_text()]:
            more = " and more" if len(wrong) > 3 else ""
            raise CommandError(f"{source}: not text: {', '.join(wrong[:3])}{more}: put each value in quotes")
        return overlay

    @property
    def namespace(self) -> str:
        """The namespace of its pods."""
        named = [each["metadata"].get("namespace") for each in self.objects if each["kind"] in _POD_MAKERS]
        return next(filter(None, named), "default")

    def nodes(self) -> list[str]:
        """The names of its nodes."""
        return sorted({name for each in self.workloads() if (name := str(each.labels.get(NODE_LABEL, "")))})

    def with_kind(self, *kinds: str) -> list[Object]:
        """Objects of these kinds."""
        return [each for each in self.objects if each["kind"] in kinds]

    def workloads(self) -> list[Workload]:
        """All objects that make pods."""
        return [_workload(each) for each in self.objects if each["kind"] in _POD_MAKERS]

    def storage_classes(self) -> dict[str, str]:
        """The storage class of each claim, of the overlay and of its StatefulSets' templates; empty
        for the cluster's default. A template's claims are called `<claim>-<StatefulSet>-<number>`.
        """
        claims = [(each["metadata"]["name"], each["spec"]) for each in self.with_kind("PersistentVolumeClaim")]
        for each in self.with_kind("StatefulSet"):
            templates = each["spec"].get("volumeClaimTemplates", [])
            claims += [(f"{one['metadata']['name']}-{each['metadata']['name']}", one["spec"]) for one in templates]
        return {name: spec.get("storageClassName") or "" for name, spec in claims}

    def variables(self, workload: Workload, container: Object) -> dict[str, Variable]:
        """The environment as far as the overlay tells it. Of a value in a Secret only that it is an
        address can be known; others are left out.
        """
        found: dict[str, Variable] = {}
        for source in container.get("envFrom", []):
            if name := source.get("configMapRef", {}).get("name"):
                prefix = source.get("prefix", "")
                entries = self._entries(name) or {}
                found |= {f"{prefix}{key}": Variable(value or "", f"ConfigMap {name}") for key, value in entries.items()}
        for entry in container.get("env", []):
            found.pop(entry["name"], None)
            if (value := self._value(workload, entry)) is not None:
                found[entry["name"]] = Variable(value, f"{workload.kind} {workload.name}")
        return found

    def mounted_file(self, workload: Workload, container: Object, path: str) -> File | None:
        """The ConfigMap's entry that the container sees as the file `path`; None if the path is on
        no ConfigMap's volume, or that ConfigMap is not in the overlay.
        """
        volumes = {each["name"]: each for each in workload.pod.get("volumes", [])}
        asked = PurePosixPath(path)
        for mount in container.get("volumeMounts", []):
            where = PurePosixPath(mount["mountPath"])
            source = volumes.get(mount["name"], {}).get("configMap")
            if source is None or not asked.is_relative_to(where):
                continue
            entries = self._entries(source["name"])
            if entries is None:
                return None
            within = mount.get("subPath") or str(asked.relative_to(where))
            paths = {item["path"]: item["key"] for item in source.get("items", [])}
            entry = paths.get(within, within)
            return File(source["name"], entry, entries.get(entry) if not paths or within in paths else None)
        return None

    def _entries(self, name: str) -> Mapping[str, str] | None:
        """The data of a ConfigMap; None if it is not in the overlay."""
        found = next((each for each in self.with_kind("ConfigMap") if each["metadata"]["name"] == name), None)
        return None if found is None else found.get("data") or {}

    def _value(self, workload: Workload, entry: Object) -> str | None:
        source = entry.get("valueFrom")
        if source is None:
            return entry.get("value") or ""
        if chosen := source.get("configMapKeyRef"):
            return (self._entries(chosen["name"]) or {}).get(chosen["key"])
        if source.get("fieldRef", {}).get("fieldPath") == "metadata.name":
            return f"{workload.name}-0"
        return _UNKNOWN_URL if "secretKeyRef" in source and entry["name"].endswith("_URL") else None

    def _not_text(self) -> Iterator[str]:
        """Each entry of a ConfigMap and each variable whose value Kubernetes would refuse."""
        for each in self.with_kind("ConfigMap"):
            data = each.get("data") or {}
            entries = data if isinstance(data, dict) else {"data": data}
            yield from (f"ConfigMap {each['metadata'].get('name')}: {key}" for key, value in entries.items() if not _is_text(value))
        for workload in self.workloads():
            for entry in (entry for each in workload.containers for entry in each.get("env", [])):
                if not _is_text(entry.get("value")):
                    yield f"{workload.kind} {workload.name}: {entry.get('name', '')}"


def probed_ports(container: Object) -> Iterator[tuple[str, int]]:
    """Each HTTP probe with the number of its port."""
    named = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        port = container.get(probe, {}).get("httpGet", {}).get("port")
        number = named.get(port, port)
        if isinstance(number, int):
            yield probe, number


def _workload(each: Object) -> Workload:
    spec = each["spec"]
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    replicas = spec.get("replicas", 1) * spec.get("leaderWorkerTemplate", {}).get("size", 1)
    return Workload(each["kind"], each["metadata"]["name"], replicas, template["spec"], each["metadata"].get("labels") or {})


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


class _Loader(yaml.SafeLoader):
    """Refuses aliases, of which `kubectl kustomize` prints none."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.line + 1} has an alias, which rendered YAML has not")
        return super().compose_node(parent, index)
