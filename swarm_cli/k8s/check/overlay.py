"""A rendered overlay: what its pods need, and what its containers are told.

Somebody else may have made the YAML: a hundred kilobytes with aliases of aliases stand for more
than any memory holds. Pure."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

import yaml

from shared.text import visible

_SUFFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIXES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", 1)}


def quantity(text: object) -> float:
    """The value of a quantity. Raises ValueError for anything else."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTP]?|[KMGTP]i)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    return float(found[1]) * _SUFFIXES[found[2]]


def shown(resource: str, amount: float) -> str:
    """An amount for display."""
    if "memory" in resource or "storage" in resource:
        return f"{amount / 2**30:.0f} GiB"
    return f"{amount:g}"


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
        """Return whether two of its pods must not be on one machine."""
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


_UNKNOWN_URL = "tls://unknown:4222"
"""Stands for an address that a Secret holds."""


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


def variables(overlay: Overlay, workload: Workload, container: Object) -> dict[str, Variable]:
    """The environment as far as the overlay tells it. Of a value in a Secret only that it is an
    address can be known; others are left out.
    """
    found: dict[str, Variable] = {}
    for source in container.get("envFrom", []):
        if name := source.get("configMapRef", {}).get("name"):
            entries = (_config_map(overlay, name) or {}).get("data") or {}
            prefix = source.get("prefix", "")
            found |= {f"{prefix}{key}": Variable(value or "", f"ConfigMap {name}") for key, value in entries.items()}
    for entry in container.get("env", []):
        found.pop(entry["name"], None)
        if (value := _value(overlay, workload, entry)) is not None:
            found[entry["name"]] = Variable(value, f"{workload.kind} {workload.name}")
    return found


def mounted_file(overlay: Overlay, workload: Workload, container: Object, path: str) -> File | None:
    """The ConfigMap's entry that the container sees as the file `path`; None if the path is on no
    ConfigMap's volume, or that ConfigMap is not in the overlay.
    """
    volumes = {each["name"]: each for each in workload.pod.get("volumes", [])}
    asked = PurePosixPath(path)
    for mount in container.get("volumeMounts", []):
        where = PurePosixPath(mount["mountPath"])
        source = volumes.get(mount["name"], {}).get("configMap")
        if source is None or not asked.is_relative_to(where):
            continue
        held = _config_map(overlay, source["name"])
        if held is None:
            return None
        within = mount.get("subPath") or str(asked.relative_to(where))
        paths = {item["path"]: item["key"] for item in source.get("items", [])}
        entry = paths.get(within, within)
        text = (held.get("data") or {}).get(entry) if not paths or within in paths else None
        return File(source["name"], entry, text)
    return None


def entry_texts(found: Object) -> dict[str, str]:
    """The entries of a Secret or ConfigMap as pods see them; empty for what is not text."""
    entries = found.get("data") or {}
    return {key: _decoded(value) for key, value in entries.items()} if found["kind"] == "Secret" else dict(entries)


def _decoded(encoded: str) -> str:
    try:
        return base64.b64decode(encoded).decode()
    except ValueError:
        return ""


def probed_ports(container: Object) -> Iterator[tuple[str, int]]:
    """Each HTTP probe with the number of its port."""
    named = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        port = container.get(probe, {}).get("httpGet", {}).get("port")
        number = named.get(port, port)
        if isinstance(number, int):
            yield probe, number


def _config_map(overlay: Overlay, name: str) -> Object | None:
    return next((each for each in overlay.with_kind("ConfigMap") if each["metadata"]["name"] == name), None)


def _value(overlay: Overlay, workload: Workload, entry: Object) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        text: str = entry.get("value") or ""
        return text
    if chosen := source.get("configMapKeyRef"):
        held: str | None = ((_config_map(overlay, chosen["name"]) or {}).get("data") or {}).get(chosen["key"])
        return held
    if source.get("fieldRef", {}).get("fieldPath") == "metadata.name":
        return f"{workload.name}-0"
    return _UNKNOWN_URL if "secretKeyRef" in source and entry["name"].endswith("_URL") else None


MAX_CHARS = 16 * 2**20
"""Of rendered YAML. A node takes some twenty thousand."""
MAX_ALIASED_CHARS = 2**20
"""What all aliases together may stand for. `kubectl kustomize` prints none."""


class _Loader(yaml.SafeLoader):
    """Counts what aliases stand for."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[Any, int] = {}
        """Of each node: the characters of its scalars, aliases written out, and one for itself."""
        self._aliased = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        if not is_alias:
            self._sizes[node] = 1 + sum(map(self._size, _parts(node)))
            return node
        self._aliased += self._size(node)
        if self._aliased > MAX_ALIASED_CHARS:
            problem = f"aliases stand for more than {MAX_ALIASED_CHARS:,} characters, among them those of this"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def _size(self, part: Any) -> int:
        # An alias within its own anchor stands for something without an end.
        return len(part) if isinstance(part, str) else self._sizes.get(part, MAX_ALIASED_CHARS + 1)


def _parts(node: Any) -> Iterator[Any]:
    if isinstance(node.value, str):
        yield node.value
    else:
        for part in node.value:
            yield from part if isinstance(part, tuple) else (part,)


def documents(text: str) -> list[Any]:
    """The documents that are not empty.

    Raises:
        ValueError: the text is not YAML, is too large, or its aliases stand for too much.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has more than {MAX_CHARS:,} characters")
    try:
        return [each for each in yaml.load_all(text, Loader=_Loader) if each]  # noqa: S506 (a safe loader)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except yaml.YAMLError as error:
        raise ValueError(visible(" ".join(str(error).split()))) from None


def not_text(overlay: Overlay) -> Iterator[str]:
    """Each entry of a ConfigMap and each variable whose value is not text, which Kubernetes
    refuses.
    """
    for each in overlay.with_kind("ConfigMap"):
        data = each.get("data") or {}
        name = f"ConfigMap {each['metadata'].get('name')}"
        if not isinstance(data, dict):
            yield f"{name}: data"
        else:
            yield from (f"{name}: {key}" for key, value in data.items() if not _is_text(value))
    for workload in overlay.workloads():
        for container in workload.containers:
            yield from (f"{workload.kind} {workload.name}: {name}" for name in _variables_not_text(container))


def _variables_not_text(container: Object) -> Iterator[str]:
    return (entry.get("name", "") for entry in container.get("env", []) if not _is_text(entry.get("value")))


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for the user: what is wrong, what it affects, and the remedy."""

    stops: bool
    """Whether a part of the swarm would not run; if not, it is only worth knowing."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{'stops' if self.stops else 'note '}  {self.what}: {self.remedy}"


def agree(names: Iterable[str], one: str, many: str) -> str:
    """The word that agrees in number with `names`: `agree(names, "stays", "stay")`."""
    return one if len(set(names)) == 1 else many


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names for a sentence: at most `most`, and how many more there are."""
    each = sorted(set(names))
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")
