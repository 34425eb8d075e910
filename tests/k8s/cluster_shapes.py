"""Objects of clusters as `kubectl get -o json` lists them, written by hand after the API's
documentation, with what matters to `swarm k8s check` and some of what does not. No cluster was
recorded: `tests/cluster` has a real API server.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
Listed = dict[str, list[Object]]
"""The objects of a cluster, by the plural of their kind."""


def machine(name: str, *, gpus: int = 0, cpus: int = 48, memory_gi: int = 384, arch: str = "amd64", **more: Any) -> Object:
    """A machine; `labels`, `taints` and `unschedulable` are added to it."""
    offered = {
        "cpu": f"{cpus * 1000 - 80}m",
        "memory": f"{memory_gi * 2**20 - 819200}Ki",
        "pods": "110",
        "ephemeral-storage": "95491281146",
    }
    if gpus:
        offered["nvidia.com/gpu"] = str(gpus)
    labels = {"kubernetes.io/arch": arch, "kubernetes.io/os": "linux", "kubernetes.io/hostname": name} | more.get("labels", {})
    spec: Object = {"podCIDR": "10.244.0.0/24", "providerID": f"example://{name}"}
    spec |= {key: more[key] for key in ("taints", "unschedulable") if key in more}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": {
            "allocatable": offered,
            "capacity": offered | {"cpu": str(cpus)},
            "nodeInfo": {"architecture": arch, "containerRuntimeVersion": "containerd://1.7.22", "kubeletVersion": "v1.33.1"},
        },
    }


def storage_class(name: str, provisioner: str, *, default: bool = False) -> Object:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": annotations},
        "provisioner": provisioner,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def named(kind: str, name: str, **more: Any) -> Object:
    return {"kind": kind, "metadata": {"name": name}, **more}


def dns_pod(namespace: str = "kube-system", *, host_network: bool = False, local_ip: str = "") -> Object:
    container = {"name": "dns", "image": "registry.k8s.io/coredns/coredns:v1.12.0", "args": ["-conf", "/etc/coredns/Corefile"]}
    if local_ip:
        container["args"] = ["-localip", f"{local_ip},10.96.0.10", "-conf", "/etc/Corefile"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "dns-7c65d6cfc9-x2k4q", "namespace": namespace, "labels": {"k8s-app": "kube-dns"}},
        "spec": {"containers": [container], **({"hostNetwork": True} if host_network else {})},
    }


def quota(name: str, **hard: str) -> Object:
    """Names with dots and slashes come as ** of a dict."""
    return {"kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}, "status": {"hard": hard, "used": {}}}


def fitting() -> dict[str, list[Object]]:
    """A cluster that the cluster overlay fits, without its Secrets: three machines of four GPUs,
    three without; of two storage classes the default is for many machines.
    """
    tainted = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
    return {
        "nodes": [
            *(machine(f"gpu-{index}", gpus=4, taints=tainted) for index in range(3)),
            *(machine(f"cpu-{index}") for index in range(3)),
        ],
        "runtimeclasses": [],
        "storageclasses": [storage_class("files", "nfs.csi.k8s.io", default=True), storage_class("disks", "ebs.csi.aws.com")],
        "priorityclasses": [named("PriorityClass", "system-cluster-critical", value=2000000000)],
        "persistentvolumeclaims": [],
        "resourcequotas": [],
        "serviceaccounts": [named("ServiceAccount", "default")],
        "dns": [dns_pod()],
    }


def no_plugin(listed: Listed) -> None:
    """Change it so that no machine offers a GPU."""
    for each in listed["nodes"]:
        each["status"]["allocatable"].pop("nvidia.com/gpu", None)
