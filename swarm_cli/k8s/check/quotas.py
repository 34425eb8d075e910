"""Checks the namespace's quotas: requests, and numbers of objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from swarm_cli.k8s.check.cluster import Cluster
from swarm_cli.k8s.check.findings import Finding
from swarm_cli.k8s.check.overlay import Overlay
from swarm_cli.k8s.check.plural import plural
from swarm_cli.k8s.check.quantity import quantity, shown

_LISTED = {"Secret": "secrets", "ConfigMap": "configmaps"}
"""Kinds of which the cluster's other objects are known, which a quota counts too."""


def findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Compare the namespace's quotas with the overlay's total requests and numbers of objects."""
    asked = _requested(overlay) | _counted(overlay)
    others = _others(overlay, cluster)
    for quota in cluster.listed.get("resourcequotas", ()):
        if quota.get("spec", {}).get("scopes") or quota.get("spec", {}).get("scopeSelector"):
            continue  # it applies only to some pods
        for resource, hard in (quota["spec"].get("hard") or {}).items():
            name = resource.removeprefix("requests.")
            wants, besides = asked.get(name, 0.0), others.get(name, 0)
            if wants and wants + besides > quantity(hard):
                what = f"ResourceQuota {quota['metadata']['name']} allows {shown(name, quantity(hard))} {resource} and the overlay"
                more = f", besides {besides} that are there already" if besides else ""
                remedy = "have it raised, or remove nodes from the overlay"
                yield Finding(True, f"{what} asks for {shown(name, wants)}{more}", remedy)


def _requested(overlay: Overlay) -> dict[str, float]:
    """The requests of all pods, and the size of all volumes."""
    total: dict[str, float] = {}
    for workload in overlay.workloads():
        for resource, amount in workload.requests().items():
            total[resource] = total.get(resource, 0.0) + amount * workload.replicas
    return total | {"storage": sum(each.copies * each.storage for each in overlay.claims())}


def _counted(overlay: Overlay) -> dict[str, float]:
    """The numbers of objects by the names that quotas give them: `count/deployments.apps`, and for
    some kinds also `services`. Objects that pods need are counted too, and what controllers make.
    """
    counts: Counter[str] = Counter(_counted_name(str(each["apiVersion"]), str(each["kind"])) for each in overlay.objects)
    needed = {(each.kind, each.name) for each in overlay.references()}
    counts.update(_counted_name("v1", kind) for kind, _ in needed)
    counts["pods"] = sum(each.replicas for each in overlay.workloads())
    counts["persistentvolumeclaims"] = sum(each.copies for each in overlay.claims())
    counts["replicasets.apps"] += len(overlay.with_kind("Deployment"))
    kinds = [each.get("spec", {}).get("type") for each in overlay.with_kind("Service")]
    exposed = {"services.loadbalancers": kinds.count("LoadBalancer")}
    exposed["services.nodeports"] = exposed["services.loadbalancers"] + kinds.count("NodePort")
    found = {f"count/{name}": float(count) for name, count in counts.items()}
    core = {name: float(count) for name, count in counts.items() if "." not in name}
    return found | core | {name: float(count) for name, count in exposed.items()}


def _counted_name(api_version: str, kind: str) -> str:
    group = api_version.rpartition("/")[0]
    return f"{plural(kind)}.{group}" if group else plural(kind)


def _others(overlay: Overlay, cluster: Cluster) -> dict[str, int]:
    """The numbers of Secrets and ConfigMaps in the namespace that are not the overlay's."""
    found: dict[str, int] = {}
    for kind, kinds in _LISTED.items():
        here = {str(each["metadata"]["name"]) for each in overlay.with_kind(kind)}
        here |= {each.name for each in overlay.references() if each.kind == kind}
        found[kinds] = found[f"count/{kinds}"] = len(cluster.names(kinds) - here)
    return found
