"""Checks what else the overlay needs from the cluster, besides machines, volumes and Secrets: kinds
of objects, classes, metrics, queues and quotas.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm_cli.k8s.check.cluster import Cluster
from swarm_cli.k8s.check.findings import Finding, listed
from swarm_cli.k8s.check.overlay import Overlay
from swarm_cli.k8s.check.quantity import quantity, shown

OLDEST_MINOR = 27
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_QUEUES = "localqueues.kueue.x-k8s.io"
_METRICS = "v1beta1.metrics.k8s.io"
_BUILT_IN = {"", "apps", "autoscaling", "batch", "policy"}
"""The API server's built-in groups, besides those that end in `.k8s.io` but not in `.x-k8s.io`."""
_BRINGS = {
    "keda.sh": "install KEDA, or put a # before `keda` and take it from `hpa` in every-node/kustomization.yaml",
    "monitoring.coreos.com": "install Prometheus's operator, or choose `monitoring-plain` in place of `monitoring`",
    "cert-manager.io": "install cert-manager, or make certificates with `swarm k8s secrets`",
    "leaderworkerset.x-k8s.io": "install LeaderWorkerSet, or keep the trainer on one machine",
}


def findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Findings in the order in which `kubectl apply` and the controllers would meet them."""
    if 0 < cluster.minor < OLDEST_MINOR:
        yield Finding(True, f"the cluster is Kubernetes 1.{cluster.minor}", f"the manifests need 1.{OLDEST_MINOR} or newer")
    yield from _custom_kinds(overlay, cluster)
    yield from _classes(overlay, cluster)
    yield from _metrics(overlay, cluster)
    yield from _queues(overlay, cluster)
    yield from _quotas(overlay, cluster)


def _custom_kinds(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Custom kinds without a definition, which apply refuses: `no matches for kind`."""
    if not cluster.knows("customresourcedefinitions"):
        return
    asked = {(str(each["apiVersion"]).rpartition("/")[0], str(each["kind"])) for each in overlay.objects}
    for group, kind in sorted(asked):
        own = group in _BUILT_IN or (group.endswith(".k8s.io") and ".x-k8s.io" not in f".{group}")
        if not own and f"{_plural(kind)}.{group}" not in cluster.custom:
            remedy = _BRINGS.get(group, "install what defines it, or remove the component from the overlay")
            yield Finding(True, f"the cluster does not know the kind {kind} ({group}), and apply ends with an error", remedy)


def _classes(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Missing RuntimeClasses and PriorityClasses: a pod that names one is never created."""
    brought = {str(each["metadata"]["name"]) for each in overlay.with_kind("PriorityClass")}
    runtimes: dict[str, list[str]] = {}
    priorities: dict[str, list[str]] = {}
    for workload in overlay.workloads():
        if runtime := workload.pod.get("runtimeClassName"):
            runtimes.setdefault(runtime, []).append(workload.name)
        if (priority := workload.pod.get("priorityClassName")) and priority not in brought and not priority.startswith("system-"):
            priorities.setdefault(priority, []).append(workload.name)
    for name in sorted(runtimes.keys() - cluster.names("runtimeclasses")) if cluster.knows("runtimeclasses") else ():
        remedy = "put a # before gpu-nvidia-operator in the node's kustomization, or install NVIDIA's GPU operator, which makes it"
        yield Finding(True, f"RuntimeClass {name} does not exist, and no pod of {listed(runtimes[name])} is ever created", remedy)
    if not cluster.knows("priorityclasses"):
        return
    for name in sorted(priorities.keys() - cluster.names("priorityclasses")):
        what = f"PriorityClass {name} does not exist, and no pod of {listed(priorities[name])} is ever created"
        yield Finding(True, what, "add `priorities` to the overlay, or ask for the class")
    if (new := brought - cluster.names("priorityclasses")) and not cluster.may_create_priorities:
        what = f"you may not create PriorityClasses ({listed(new)}), which belong to the whole cluster"
        yield Finding(True, what, "put a # before `priorities` in the overlay, or ask somebody who may")


def _metrics(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    scaled = [each for each in overlay.with_kind("HorizontalPodAutoscaler")]
    if not scaled or not cluster.knows("apiservices"):
        return
    served = cluster.find("apiservices", _METRICS)
    conditions = served.get("status", {}).get("conditions", []) if served is not None else []
    if not any(each["type"] == "Available" and each["status"] == "True" for each in conditions):
        what = "nothing serves metrics.k8s.io, so the number of verifiers does not change"
        yield Finding(False, what, "install metrics-server, or remove the component `hpa`")


def _queues(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Kueue holds a workload for ever if it names a queue that does not exist in its namespace."""
    named: dict[str, list[str]] = {}
    for workload in overlay.workloads():
        if queue := workload.labels.get(QUEUE_LABEL):
            named.setdefault(queue, []).append(workload.name)
    if not named or not cluster.knows("customresourcedefinitions"):
        return
    if _QUEUES not in cluster.custom:
        yield Finding(False, "Kueue is not installed, so its queue label has no effect", "install it, or remove `kueue`")
    elif cluster.knows("localqueues"):
        for queue in sorted(named.keys() - cluster.names("localqueues")):
            what = f"LocalQueue {queue} does not exist in {overlay.namespace}, and Kueue holds {listed(named[queue])} back"
            yield Finding(True, what, "make it, or name another in k8s/components/kueue")


def _quotas(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Compare the namespace's quotas with the overlay's total requests."""
    asked = _asked(overlay)
    for quota in cluster.listed.get("resourcequotas", ()):
        if quota.get("spec", {}).get("scopes") or quota.get("spec", {}).get("scopeSelector"):
            continue  # it applies only to some pods
        for resource, hard in (quota["spec"].get("hard") or {}).items():
            name = resource.removeprefix("requests.")
            if asked.get(name, 0.0) > quantity(hard):
                there = shown(name, quantity(hard))
                what = f"ResourceQuota {quota['metadata']['name']} allows {there} {resource} and the overlay asks for"
                yield Finding(True, f"{what} {shown(name, asked[name])}", "have it raised, or remove nodes from the overlay")


def _asked(overlay: Overlay) -> dict[str, float]:
    """The requests of all pods, the number of pods, and the number and size of all volumes."""
    total: dict[str, float] = {"pods": 0.0}
    for workload in overlay.workloads():
        total["pods"] += workload.replicas
        for resource, amount in workload.requests().items():
            total[resource] = total.get(resource, 0.0) + amount * workload.replicas
    claims = overlay.claims()
    total["persistentvolumeclaims"] = float(sum(each.copies for each in claims))
    total["storage"] = sum(each.copies * each.storage for each in claims)
    return total


def _plural(kind: str) -> str:
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith(("s", "x", "ch")) else f"{name}s"
