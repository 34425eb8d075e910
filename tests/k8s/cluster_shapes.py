"""Objects of clusters as `kubectl get` lists them, written by hand after the API's documentation,
with what matters to `swarm k8s check` and some of what does not. No cluster was recorded:
`tests/cluster` has a real API server.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
Listed = dict[str, list[Object]]
"""The objects of a cluster, by the plural of their kind."""


def quota(name: str, **hard: str) -> Object:
    """Names with dots and slashes come as ** of a dict."""
    return {"kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}, "status": {"hard": hard, "used": {}}}


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


def fitting() -> Listed:
    """A cluster that the cluster overlay fits."""
    return {
        "resourcequotas": [],
        "statefulsets": [],
        "runtimeclasses": [],
        "storageclasses": [storage_class("disks", "ebs.csi.aws.com", default=True), storage_class("files", "nfs.csi.k8s.io")],
        "priorityclasses": [named("PriorityClass", "system-cluster-critical", value=2000000000)],
        "dns": [dns_pod()],
    }
