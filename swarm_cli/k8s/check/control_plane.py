"""Checks what else the overlay needs from the cluster, besides machines, volumes and Secrets: kinds
of objects, classes, accounts, metrics, queues and quotas.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm_cli.k8s.check import quotas
from swarm_cli.k8s.check.cluster import Cluster
from swarm_cli.k8s.check.findings import Finding, listed
from swarm_cli.k8s.check.overlay import Overlay
from swarm_cli.k8s.check.plural import plural

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
    yield from _service_accounts(overlay, cluster)
    yield from quotas.findings(overlay, cluster)


def _custom_kinds(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Custom kinds without a definition, which apply refuses: `no matches for kind`."""
    if not cluster.knows("customresourcedefinitions"):
        return
    asked = {(str(each["apiVersion"]).rpartition("/")[0], str(each["kind"])) for each in overlay.objects}
    for group, kind in sorted(asked):
        own = group in _BUILT_IN or (group.endswith(".k8s.io") and ".x-k8s.io" not in f".{group}")
        if not own and f"{plural(kind)}.{group}" not in cluster.custom:
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


def _service_accounts(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Every namespace has the account `default`."""
    if not cluster.knows("serviceaccounts"):
        return
    brought = {str(each["metadata"]["name"]) for each in overlay.with_kind("ServiceAccount")}
    named: dict[str, list[str]] = {}
    for workload in overlay.workloads():
        if account := workload.pod.get("serviceAccountName"):
            named.setdefault(account, []).append(workload.name)
    for name in sorted(named.keys() - brought - cluster.names("serviceaccounts") - {"default"}):
        what = f"ServiceAccount {name} does not exist, and no pod of {listed(named[name])} is ever created"
        remedy = f"run `kubectl -n {overlay.namespace} create serviceaccount {name}`, or name one that does exist"
        yield Finding(True, what, remedy)
