"""A rendered overlay as `podman kube play` 4.3 can run it.

Podman knows Pod, PersistentVolumeClaim and ConfigMap. So the template of each Deployment and
StatefulSet becomes one Pod under the name of the service that leads to it (podman's DNS knows pods
by name), claim templates and empty folders become volumes that the tests prepare as a kubelet does
(podman's are root's alone), and objects for the cluster alone (Service, Namespace, NetworkPolicy)
are left out. Probes are taken out and asked by the tests, as they are written; ports, which podman
would open on this machine, too. What a container runs with, its command, environment, mounts, user,
read-only root, capabilities and limits, stays as it is; only the images are those under test.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.containers.podman import NAME
from tests.k8s.manifests import build

USER = 10001


@dataclass(frozen=True)
class PlayedPod:
    """One pod, and what Kubernetes would do about it."""

    name: str
    role: str
    manifest: dict[str, Any]
    probes: dict[str, dict[str, Any]]
    """By kind (startupProbe, readinessProbe, livenessProbe), with numeric ports."""
    pre_stop: list[str]
    grace_s: int

    @property
    def container(self) -> str:
        """Name that podman gives the pod's only container."""
        return f"{self.name}-{self.manifest['spec']['containers'][0]['name']}"

    @property
    def volumes(self) -> list[str]:
        """Podman's volumes that have to be there before the pod."""
        volumes = self.manifest["spec"].get("volumes", [])
        return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]


def render(overlay: Path) -> list[dict[str, Any]]:
    """The objects of an overlay."""
    return [document for document in yaml.safe_load_all(build(overlay)) if document]


def pods(objects: list[dict[str, Any]], images: dict[str, str]) -> list[PlayedPod]:
    """One pod per workload. `images`: reference under test by the image's name in the manifests,
    e.g. swarm-nats.
    """
    services = [document for document in objects if document["kind"] == "Service"]
    return [_pod(document, services, images) for document in objects if document["kind"] in ("Deployment", "StatefulSet")]


def config_maps(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As they are; podman reads no namespace."""
    return [document for document in objects if document["kind"] == "ConfigMap"]


def _pod(workload: dict[str, Any], services: list[dict[str, Any]], images: dict[str, str]) -> PlayedPod:
    template = deepcopy(workload["spec"]["template"])
    spec = template["spec"]
    assert len(spec["containers"]) == 1 and workload["spec"].get("replicas", 1) == 1, workload["metadata"]["name"]
    container = spec["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    probes = {kind: container.pop(kind) for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in container}
    for probe in probes.values():
        probe["httpGet"]["port"] = ports.get(probe["httpGet"]["port"], probe["httpGet"]["port"])
    pre_stop = container.pop("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    repository = container["image"].split("@")[0].rsplit(":", 1)[0]
    container["image"] = images[repository.rsplit("/", 1)[-1]]
    container.pop("ports", None)
    volumes = spec.setdefault("volumes", [])
    for claim in workload["spec"].get("volumeClaimTemplates", []):
        claim_name = f"{claim['metadata']['name']}-{workload['metadata']['name']}-0"
        volumes.append({"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": claim_name}})
    for volume in volumes:
        if volume.pop("emptyDir", None) is not None:
            volume["persistentVolumeClaim"] = {"claimName": f"empty-{workload['metadata']['name']}-{volume['name']}"}
        if claim := volume.get("persistentVolumeClaim"):
            claim["claimName"] = f"{NAME}-{claim['claimName']}"
    labels = template["metadata"]["labels"]
    found = [service["metadata"]["name"] for service in services if _selects(service, labels)]
    # A headless service names the pods behind it; the other name is the one that clients use.
    name = min(found, key=len) if found else workload["metadata"]["name"]
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {**labels, NAME: "pod"}}, "spec": spec}
    return PlayedPod(
        name, labels["app.kubernetes.io/component"], manifest, probes, pre_stop, int(spec.get("terminationGracePeriodSeconds", 30))
    )


def _selects(service: dict[str, Any], labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in service["spec"]["selector"].items())
