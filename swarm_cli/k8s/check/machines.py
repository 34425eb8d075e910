"""Checks whether each pod fits on a machine, and all pods together on all machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from swarm_cli.k8s.check.cluster import Cluster, Object
from swarm_cli.k8s.check.findings import Finding, agree, listed
from swarm_cli.k8s.check.overlay import Overlay, Workload
from swarm_cli.k8s.check.quantity import quantity, shown

GPU = "nvidia.com/gpu"
_ADD = "add machines, or ask for less in the node's kustomization.yaml"
_NO_GPU = (
    "install NVIDIA's device plugin or GPU operator where there are GPUs; `kubectl describe node` lists them under Allocatable"
)


def findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """What the scheduler would report about each pod on otherwise empty machines, and about all
    pods together. Resources that other pods use are ignored.
    """
    if not cluster.knows("nodes"):
        return
    machines = [each for each in cluster.listed["nodes"] if not each["spec"].get("unschedulable")]
    workloads = [each for each in overlay.workloads() if each.replicas > 0]
    if not machines:
        yield Finding(True, "the cluster has no machine that takes pods", "add one, or `kubectl uncordon` one")
        return
    refused: dict[tuple[str, str], list[str]] = {}
    for workload in workloads:
        reason = _why_nowhere(workload, machines)
        if reason is not None:
            refused.setdefault(reason, []).append(workload.name)
    for (what, remedy), names in refused.items():
        yield Finding(True, f"{what}, and {listed(names)} {agree(names, 'stays', 'stay')} Pending", remedy)
    yield from _together(workloads, machines)
    yield from _apart(workloads, machines)


def _why_nowhere(workload: Workload, machines: Sequence[Object]) -> tuple[str, str] | None:
    """Why no machine takes a pod of `workload`, and the remedy; None if one does. Conditions are
    checked in order, so that the first failure is the cause.
    """
    left = list(machines)
    for label, value in (workload.pod.get("nodeSelector") or {}).items():
        left = [each for each in left if each["metadata"].get("labels", {}).get(label) == value]
        if not left:
            return f"no machine has the label {label}={value}", _label_remedy(label)
    requests = workload.requests()
    for resource in sorted(requests, key=lambda name: name != GPU):
        most = max(_allocatable(each, resource) for each in left)
        if requests[resource] > most:
            if resource == GPU and most == 0:
                return f"no machine that fits offers {GPU}", _NO_GPU
            what = (
                f"no machine that fits has {shown(resource, requests[resource])} {resource} (the most is {shown(resource, most)})"
            )
            return what, _ADD
        left = [each for each in left if _allocatable(each, resource) >= requests[resource]]
    if not (tolerated := [each for each in left if not _untolerated(workload, each)]) and left:
        return f"every machine that fits has the taint {_untolerated(workload, left[0])}", "add a toleration, or remove the taint"
    return None if tolerated else ("no machine fits", _ADD)


def _together(workloads: Sequence[Workload], machines: Sequence[Object]) -> Iterator[Finding]:
    needed: dict[str, float] = {}
    for workload in workloads:
        for resource, amount in workload.requests().items():
            needed[resource] = needed.get(resource, 0.0) + amount * workload.replicas
    for resource, amount in sorted(needed.items()):
        there = sum(_allocatable(each, resource) for each in machines)
        if 0 < there < amount:
            what = f"all pods ask for {shown(resource, amount)} {resource} and all machines have {shown(resource, there)}"
            yield Finding(True, f"{what}, so some pods stay Pending", _ADD)


def _apart(workloads: Sequence[Workload], machines: Sequence[Object]) -> Iterator[Finding]:
    """Pods that each need a separate machine, such as the NATS servers."""
    for workload in workloads:
        if workload.alone_on_a_machine():
            fitting = sum(_why_nowhere(workload, [each]) is None for each in machines)
            if 0 < fitting < workload.replicas:
                what = f"{workload.name} needs {workload.replicas} machines, one per pod, but only {fitting} are suitable"
                remedy = 'add machines, or let pods share one (docs/kubernetes-start.md, "A cluster")'
                yield Finding(True, what, remedy)


def _allocatable(machine: Object, resource: str) -> float:
    offered: Mapping[str, str] = machine["status"].get("allocatable", {})
    return quantity(offered[resource]) if resource in offered else 0.0


def _untolerated(workload: Workload, machine: Object) -> str:
    """A taint that keeps the pod away; empty if none does."""
    for taint in machine["spec"].get("taints", []):
        if taint["effect"] != "PreferNoSchedule" and not any(
            _tolerates(each, taint) for each in workload.pod.get("tolerations", [])
        ):
            return f"{taint['key']}={taint.get('value', '')}:{taint['effect']}"
    return ""


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))


def _label_remedy(label: str) -> str:
    if label == "nvidia.com/gpu.present":
        return "the feature discovery of NVIDIA's GPU operator sets it; without the operator put a # before gpu-nvidia-operator"
    if label == "kubernetes.io/arch":
        return "build the images on such a machine and change k8s/components/images/architecture.yaml"
    return "label a machine, or change the nodeSelector"
