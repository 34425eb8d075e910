"""The manifests as tests see them: overlays rendered by the real kustomize, with lines switched on
and off as a person would.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
K8S = REPOSITORY / "k8s"
KUBERNETES_PAGES = [REPOSITORY / "docs" / f"kubernetes-{part}.md" for part in ("start", "change", "trouble")]
ROLES = ("generator", "verifier", "sampler", "trainer")
RENDER_TIMEOUT_S = 120.0

Object = dict[str, Any]


def kubernetes_pages() -> str:
    """The pages on Kubernetes, one after the other."""
    return "\n".join(page.read_text() for page in KUBERNETES_PAGES)


@dataclass(frozen=True)
class Variant:
    """An overlay with components switched: each a kustomization under the overlay, and the
    component's name.
    """

    overlay: str
    on: tuple[tuple[str, str], ...] = ()
    off: tuple[tuple[str, str], ...] = ()


TOP, EVERY, GAMMA = "kustomization.yaml", "every-node/kustomization.yaml", "nodes/gamma/kustomization.yaml"
LEAF = ((TOP, "nats-tls"), (TOP, "nats-reload"), (TOP, "nats-leaf"), (EVERY, "nats-tls-client"), (EVERY, "swarm-leaf"))
VARIANTS = {
    "single-box": Variant("single-box"),
    "single-box-gpu": Variant("single-box", on=((EVERY, "gpu-nvidia"),)),
    "single-box-gpu-operator": Variant("single-box", on=((EVERY, "gpu-nvidia"), (EVERY, "gpu-nvidia-operator"))),
    "single-box-policies-over-nats": Variant("single-box", off=((EVERY, "policy-volume"),)),
    "single-box-watched": Variant("single-box", on=((TOP, "nats-exporter"), (TOP, "monitoring"))),
    "cluster": Variant("cluster"),
    "cluster-keda": Variant("cluster", on=((EVERY, "keda"),), off=((EVERY, "hpa"),)),
    "cluster-fixed-verifiers": Variant("cluster", off=((EVERY, "hpa"),)),
    "cluster-downloading": Variant("cluster", on=((EVERY, "model-download"),)),
    "cluster-policies-by-volume": Variant("cluster", on=((EVERY, "policy-volume"),), off=((GAMMA, "policy-volume"),)),
    "cluster-watched": Variant("cluster", on=((TOP, "nats-exporter"), (TOP, "nats-watch"), (TOP, "monitoring"))),
    "cluster-plainly-seen": Variant("cluster", on=((TOP, "nats-exporter"), (TOP, "nats-watch"), (TOP, "monitoring-plain"))),
    "cluster-without-tls": Variant(
        "cluster", off=((TOP, "nats-tls"), (TOP, "swarm-streams"), (TOP, "nats-reload"), (EVERY, "nats-tls-client"))
    ),
    "cluster-cert-manager": Variant("cluster", on=((TOP, "cert-manager"), (TOP, "nats-watch"))),
    "cluster-exposed": Variant("cluster", on=((TOP, "nats-expose"),)),
    "cluster-exposed-one-server": Variant("cluster", on=((TOP, "nats-expose"),), off=((TOP, "nats-cluster"),)),
    "joined": Variant("joined"),
    "joined-leaf": Variant("joined", on=LEAF, off=((EVERY, "swarm-outside"),)),
    "joined-leaf-cluster": Variant("joined", on=((TOP, "nats-cluster"), *LEAF), off=((EVERY, "swarm-outside"),)),
    "cluster-gpu-operator": Variant(
        "cluster", on=tuple((f"nodes/{node}/kustomization.yaml", "gpu-nvidia-operator") for node in ("alpha", "beta", "gamma"))
    ),
    "cluster-without-priorities": Variant("cluster", off=((TOP, "priorities"),)),
    "cluster-kueue": Variant("cluster", on=((TOP, "kueue"),)),
    "cluster-generator-gpus": Variant("cluster", on=((GAMMA, "generator-gpus"),)),
    "cluster-trainer-machines": Variant("cluster", on=((GAMMA, "trainer-machines"),)),
    "cluster-one-server": Variant("cluster", off=((TOP, "nats-cluster"),)),
    "cluster-unrestricted": Variant("cluster", off=((TOP, "network-policy"), (TOP, "restricted"))),
    "cluster-everything": Variant(
        "cluster",
        on=((TOP, "nats-exporter"), (TOP, "monitoring"), (EVERY, "keda"), (EVERY, "model-download")),
        off=((EVERY, "hpa"),),
    ),
}


@cache
def kustomize() -> tuple[str, ...] | None:
    """The command that renders a folder: kubectl's own, or kustomize alone (`scripts/test-packages`
    installs it where npm is).
    """
    if kubectl := shutil.which("kubectl"):
        return (kubectl, "kustomize")
    beside = [str(path) for path in (REPOSITORY / ".venv" / "kustomize").glob("**/kustomize-linux-x64/kustomize-linux-x64")]
    for binary in [shutil.which("kustomize"), *beside]:
        if binary:
            return (binary, "build")
    return None


def build(folder: Path) -> str:
    """Return what a folder renders to, as YAML text."""
    command = kustomize()
    if command is None:
        pytest.skip("neither kubectl nor kustomize is here: run scripts/test-packages, or install one")
    # A third of its time is Go's garbage collection, of 90 MB.
    environment = {"GOGC": "400"} | os.environ
    done = subprocess.run(
        [*command, str(folder)], capture_output=True, text=True, timeout=RENDER_TIMEOUT_S, check=False, env=environment
    )
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return done.stdout


def parsed(text: str) -> tuple[Object, ...]:
    """The objects of YAML text. libyaml, where it is built in, takes an eighth of the time."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(document for document in yaml.load_all(text, Loader=loader) if document)


@cache
def render(name: str) -> tuple[Object, ...]:
    """Objects of a variant."""
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "k8s"
        shutil.copytree(K8S, copy)
        overlay = switched(variant, copy)
        return parsed(build(overlay))


def switched(variant: Variant, copy: Path) -> Path:
    """The variant's overlay in a copy of the folder `k8s`, with its components switched."""
    overlay = copy / "overlays" / variant.overlay
    for file, component in variant.on:
        _switch(overlay / file, component, on=True)
    for file, component in variant.off:
        _switch(overlay / file, component, on=False)
    return overlay


def _switch(file: Path, component: str, *, on: bool) -> None:
    """Add or remove the `#` before a component's line; it is an error if the file has no such
    line.
    """
    line = re.compile(rf"^(\s*)(# )?(- [./]+/components/{re.escape(component)})$", re.MULTILINE)
    text, changed = line.subn(r"\1\3" if on else r"\1# \3", file.read_text())
    assert changed == 1, f"{file}: {changed} lines name the component {component}"
    file.write_text(text)


def with_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def name_of(each: Object) -> str:
    return str(each["metadata"]["name"])


def label(each: Object, key: str) -> str | None:
    value: str | None = each["metadata"].get("labels", {}).get(key)
    return value


def role_of(each: Object) -> str | None:
    return label(each, "app.kubernetes.io/component")


def node_of(each: Object) -> str | None:
    return label(each, "swarm-rl.dev/node")


def workloads(objects: Iterable[Object]) -> list[Object]:
    """Everything that makes pods. A LeaderWorkerSet makes pods from two templates and counts as two
    workloads.
    """
    objects = list(objects)
    groups = [part for each in with_kind(objects, "LeaderWorkerSet") for part in _parts(each)]
    return [*with_kind(objects, "Deployment", "StatefulSet", "Job", "DaemonSet", "CronJob", "Pod"), *groups]


def _parts(group: Object) -> Iterator[Object]:
    told = group["spec"]["leaderWorkerTemplate"]
    for template, suffix, count in (("leaderTemplate", "", 1), ("workerTemplate", "-worker", told["size"] - 1)):
        labels = told[template]["metadata"]["labels"]
        metadata = {**group["metadata"], "name": name_of(group) + suffix, "labels": labels}
        yield {**group, "metadata": metadata, "spec": {"replicas": count, "template": told[template]}}


def pod_of(workload: Object) -> Object:
    pod: Object = workload["spec"]["template"]["spec"]
    return pod


def pod_labels(workload: Object) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def containers(workload: Object) -> list[Object]:
    pod = pod_of(workload)
    return [*pod.get("initContainers", []), *pod["containers"]]


def every_container(objects: Iterable[Object]) -> Iterator[tuple[Object, Object]]:
    for workload in workloads(objects):
        for container in containers(workload):
            yield workload, container


def find(objects: Iterable[Object], kind: str, name: str) -> Object:
    found = [each for each in objects if each["kind"] == kind and name_of(each) == name]
    assert len(found) == 1, f"{len(found)} objects are {kind} {name}"
    return found[0]


def environment(objects: Iterable[Object], container: Object) -> dict[str, str | None]:
    """Return what a container's process finds in its environment; None for what is known on the
    cluster alone.
    """
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            found |= find(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in container.get("env", []):
        found[entry["name"]] = entry.get("value")
    return found


def selected(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a label selector takes these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        value, values = labels.get(rule["key"]), rule.get("values", [])
        holds = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[rule["operator"]]
        if not holds:
            return False
    return True


def services(objects: Iterable[Object]) -> Iterator[tuple[Object, Object]]:
    """Workloads of the four roles, with the container of the service."""
    for workload in workloads(objects):
        if role_of(workload) in ROLES:
            yield workload, pod_of(workload)["containers"][0]


def nats_files(objects: Iterable[Object]) -> dict[str, str]:
    """The NATS server's configuration files."""
    volumes = pod_of(find(objects, "StatefulSet", "nats"))["volumes"]
    config = next(each for each in volumes if each["name"] == "config")
    files: dict[str, str] = find(objects, "ConfigMap", config["configMap"]["name"])["data"]
    return files


def amount(quantity: str) -> float:
    """A Kubernetes quantity as a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m|Ki|Mi|Gi|Ti|K|M|G|T)?", quantity)
    assert found is not None, quantity
    units = {None: 1.0, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    return float(found[1]) * units[found[2]]
