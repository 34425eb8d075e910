"""Pods out of rendered manifests: which containers run, with which command, environment and
volumes. Nothing is added.
"""

from __future__ import annotations

import base64
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.k8s.images import Stage
from tests.k8s.manifests import Object, find, name_of, pod_labels, pod_of, selected, with_kind, workloads

DEFAULT_GRACE_S = 30


@dataclass(frozen=True)
class Pod:
    """One replica of a workload."""

    name: str
    role: str
    labels: dict[str, str]
    spec: Object
    claims: dict[str, str]
    """Volume name to claim name, for claims that come from a StatefulSet's templates."""
    shared: frozenset[str] = frozenset()
    """Names of volumes that several of the pod's containers mount."""
    process_ids: str = ""
    """File of the process namespace that the pod's containers share; empty: each has its own."""

    @property
    def container(self) -> Object:
        """Its only container."""
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def grace_s(self) -> float:
        """Between the beginning of the end and SIGKILL."""
        return float(self.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))

    @property
    def pre_stop(self) -> list[str]:
        """Command that runs in the container before SIGTERM."""
        hook = self.container.get("lifecycle", {}).get("preStop", {})
        assert not hook or set(hook) == {"exec"}, f"{self.name}: a preStop hook that this does not know: {hook}"
        return list(hook.get("exec", {}).get("command", []))

    def port(self, named: str | int) -> int:
        """A port of one of its containers by its name."""
        if isinstance(named, int):
            return named
        ports = (port for container in self.spec["containers"] for port in container.get("ports", []))
        return int(next(port["containerPort"] for port in ports if port["name"] == named))


def pods_of(objects: tuple[Object, ...]) -> list[Pod]:
    """The pods that the controllers would make, under names of the kind that they give."""
    pods = []
    for workload in workloads(objects):
        assert workload["kind"] in ("Deployment", "StatefulSet"), f"{workload['kind']} is not run here"
        assert not pod_of(workload).get("initContainers"), f"{name_of(workload)}: init containers are not run here"
        pods += [pod_from(workload, ordinal) for ordinal in range(workload["spec"].get("replicas", 1))]
    return pods


def pod_from(workload: Object, ordinal: int = 0) -> Pod:
    """One pod of a workload."""
    stateful = workload["kind"] == "StatefulSet"
    name = f"{name_of(workload)}-{ordinal if stateful else f'6d4cf56db6-x{ordinal}k2q'}"
    templates = workload["spec"].get("volumeClaimTemplates", [])
    claims = {template["metadata"]["name"]: f"{template['metadata']['name']}-{name}" for template in templates}
    labels = pod_labels(workload)
    return Pod(name, labels["app.kubernetes.io/component"], labels, pod_of(workload), claims)


def apart(pod: Pod) -> list[Pod]:
    """The pod's containers, the init containers first, each as a pod of its own with the same
    volumes.
    """
    each = [*pod.spec.get("initContainers", []), *pod.spec["containers"]]
    mounted = Counter(mount["name"] for one in each for mount in one.get("volumeMounts", []))
    shared = frozenset(name for name, count in mounted.items() if count > 1)
    return [replace(pod, spec={**pod.spec, "initContainers": [], "containers": [one]}, shared=shared) for one in each]


def command_of(container: Object, image: Stage) -> list[str]:
    """Return what runs: the manifest's command and arguments, and the image's where the manifest
    has none.
    """
    command = container.get("command") or list(image.entrypoint)
    arguments = container.get("args") or ([] if container.get("command") else list(image.command))
    return [*command, *arguments]


def environment_of(pod: Pod, objects: tuple[Object, ...], image: Stage) -> dict[str, str]:
    """Return what the process finds: the image's variables, the pod's, and HOSTNAME, which the
    runtime sets.
    """
    found = {"HOSTNAME": pod.name, **image.environment}
    for source in pod.container.get("envFrom", []):
        found |= {source.get("prefix", "") + key: value for key, value in _keys(objects, source).items()}
    for entry in pod.container.get("env", []):
        found[entry["name"]] = _value(entry, pod, objects, found)
    return found


def _value(entry: Object, pod: Pod, objects: tuple[Object, ...], known: dict[str, str]) -> str:
    if "valueFrom" not in entry:
        return re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), str(entry.get("value", "")))
    source = entry["valueFrom"]
    if "fieldRef" in source:
        path = source["fieldRef"]["fieldPath"]
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        return pod.labels[label[1]] if label else {"metadata.name": pod.name, "metadata.namespace": "swarm"}[path]
    for kind, reference in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if reference in source:
            return str(find(objects, kind, source[reference]["name"])["data"][source[reference]["key"]])
    raise AssertionError(f"{pod.name}: {entry['name']} comes from something that this does not know: {source}")


def _keys(objects: tuple[Object, ...], source: Object) -> dict[str, str]:
    assert set(source) - {"prefix"} == {"configMapRef"}, f"envFrom of something that this does not know: {source}"
    return dict(find(objects, "ConfigMap", source["configMapRef"]["name"])["data"])


class Volumes:
    """The volumes of all pods as folders below one; claims are shared by the pods that name
    them. What several containers of a pod share in memory is a folder without a limit.
    """

    def __init__(self, folder: Path, objects: tuple[Object, ...]) -> None:
        self._folder = folder
        self._objects = objects

    def mounts(self, pod: Pod) -> tuple[list[list[Any]], list[list[str]]]:
        """Bind mounts (source, target, read-only) and memory file systems (target, size) of a pod's
        container.
        """
        volumes: dict[str, Object] = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        binds, memory = [], []
        for mount in sorted(pod.container.get("volumeMounts", []), key=lambda mount: len(mount["mountPath"])):
            name, read_only = mount["name"], mount.get("readOnly", False)
            volume = volumes.get(name, {"persistentVolumeClaim": {"claimName": pod.claims.get(name)}})
            if volume.get("emptyDir", {}).get("medium") == "Memory" and name not in pod.shared:
                memory.append([mount["mountPath"], volume["emptyDir"]["sizeLimit"].replace("i", "")])
                continue
            source = self._source(pod, name, volume)
            read_only = read_only or bool({"configMap", "secret"} & volume.keys())
            read_only = read_only or volume.get("persistentVolumeClaim", {}).get("readOnly", False)
            binds.append([str(source / mount.get("subPath", "")), mount["mountPath"], read_only])
        return binds, memory

    def renew_secrets(self, pod: Pod) -> None:
        """Write the Secrets that the pod mounts as they are now, which a kubelet does within about
        a minute.
        """
        for volume in pod.spec.get("volumes", []):
            if "secret" in volume:
                self._source(pod, volume["name"], volume)

    def _source(self, pod: Pod, name: str, volume: Object) -> Path:
        if "configMap" in volume:
            folder = self._folder / f"{pod.name}-{name}"
            folder.mkdir(parents=True, exist_ok=True)
            for key, text in find(self._objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
                (folder / key).write_text(text)
            return folder
        if "secret" in volume:
            return self._secret(self._folder / f"{pod.name}-{name}", volume["secret"], pod)
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert claim is not None, f"{pod.name} mounts {name}, which it has not"
            if claim not in pod.claims.values():
                find(self._objects, "PersistentVolumeClaim", claim)
            return self._for_group(self._folder / f"claim-{claim}", pod)
        assert "emptyDir" in volume, f"{pod.name}: a volume that this does not know: {volume}"
        return self._for_group(self._folder / f"{pod.name}-{name}", pod)

    def _secret(self, folder: Path, secret: Object, pod: Pod) -> Path:
        # As the kubelet does with fsGroup: root's, and readable for the pod's group alone.
        folder.mkdir(parents=True, exist_ok=True)
        entries: dict[str, str] = find(self._objects, "Secret", secret["secretName"])["data"]
        paths = {item["key"]: item["path"] for item in secret.get("items", [])} or {key: key for key in entries}
        for key, path in paths.items():
            new = folder / f"..{path}"
            new.write_bytes(base64.b64decode(entries[key]))
            os.chown(new, 0, pod.spec["securityContext"]["fsGroup"])
            new.chmod(0o440)
            new.replace(folder / path)
        return folder

    def _for_group(self, folder: Path, pod: Pod) -> Path:
        """Do what fsGroup does: the folder belongs to the pod's group, which may write."""
        if not folder.exists():
            folder.mkdir(parents=True)
            os.chown(folder, 0, pod.spec["securityContext"]["fsGroup"])
            folder.chmod(0o2775)
        return folder


def hosts(pods: dict[str, tuple[Pod, str]], objects: tuple[Object, ...]) -> str:
    """Return what the cluster's DNS answers, as a hosts file. `pods`: each with its address."""
    lines = ["127.0.0.1 localhost"]
    for service in with_kind(objects, "Service"):
        namespace = service["metadata"]["namespace"]
        for pod, address in pods.values():
            if not selected({"matchLabels": service["spec"]["selector"]}, pod.labels):
                continue
            for port in service["spec"]["ports"]:
                assert port["port"] == pod.port(port["targetPort"]), f"{name_of(service)}: a hosts file cannot translate ports"
            names = [name_of(service)]
            if service["spec"].get("clusterIP") == "None":
                names.append(f"{pod.name}.{name_of(service)}")
            suffixes = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
            lines.append(" ".join([address, *(name + suffix for name in names for suffix in suffixes)]))
    lines += [f"{address} {pod.name}" for pod, address in pods.values()]
    return "\n".join(lines) + "\n"
