"""Rules over an overlay and its cluster: images, models, classes, quotas, volumes, machines, DNS. A
server-side dry run says the rest.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence

from shared.hub_models import COMMIT
from swarm_cli.k8s.check.cluster import Cluster
from swarm_cli.k8s.check.overlay import Claim, Finding, Object, Overlay, Workload, agree, entry_texts, listed, quantity, shown

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NOTHING = "sha256:" + "0" * 64
_FROM_MAKE = "`make images REGISTRY=... PUSH=1` writes the digests of what it pushed into k8s/components/images"


def image_findings(overlay: Overlay) -> Iterator[Finding]:
    """Findings about placeholders, malformed digests, moving tags, and images without a
    registry.
    """
    images = {container["image"] for workload in overlay.workloads() for container in workload.containers}
    placeholders = {image for image in images if image.startswith("registry.invalid/") or image.endswith(_NOTHING)}
    if placeholders:
        yield Finding(True, f"no image is named yet ({listed(placeholders, 1)})", _FROM_MAKE)
    for image in sorted(images - placeholders):
        name, at, digest = image.partition("@")
        if at and not _DIGEST.fullmatch(digest):
            yield Finding(True, f"image {image} has an invalid digest: it needs sha256: and 64 hexadecimal digits", _FROM_MAKE)
        elif not at and ":" not in name.rsplit("/", 1)[-1]:
            if "/" not in name:
                what = f"no entry under `images` of the kustomization matches the image {image}, so no registry has it"
                yield Finding(True, what, f"correct the entry's name to `{name}`, or add one with newName and digest")
                continue
            yield Finding(True, f"image {image} has neither a tag nor a digest, so it is whatever was pushed last", _FROM_MAKE)
    if local := {image for image in images if image.startswith("localhost/")}:
        remedy = "load them with `kind load docker-image`, `k3d image import` or `minikube image load`"
        yield Finding(False, f"images of localhost must be on every machine ({listed(local, 2)})", remedy)


COMPONENT, DOWNLOAD = "app.kubernetes.io/component", "model-download"
_ENTRY_MISSING = {
    "volume": ("mounts", "mount", "stays in ContainerCreating", "stay in ContainerCreating"),
    "variable": ("reads", "read", "stays in CreateContainerConfigError", "stay in CreateContainerConfigError"),
}


def model_findings(overlay: Overlay) -> Iterator[Finding]:
    """Findings that need no cluster."""
    held = {(each["kind"], each["metadata"]["name"]): each for each in overlay.objects}
    for reference, workloads in overlay.own_references().items():
        found = held[reference.kind, reference.name]
        has = {*(found.get("data") or {}), *(found.get("stringData") or {}), *(found.get("binaryData") or {})}
        for key in sorted(reference.keys - has):
            verb, verbs, stays, stay = _ENTRY_MISSING[reference.use]
            who = f"which {listed(workloads)} {agree(workloads, verb, verbs)}"
            what = f"{reference.kind} {reference.name} has no entry {key}, {who} and so {agree(workloads, stays, stay)}"
            yield Finding(True, what, f"add {key}= to it in the kustomization that makes it")
    for workload in overlay.workloads():
        if workload.labels.get(COMPONENT) == DOWNLOAD:
            for container in workload.containers:
                yield from _downloaded(container, held)


def _downloaded(container: Object, held: dict[tuple[str, str], Object]) -> Iterator[Finding]:
    """The revision of one container's download."""
    picks = {each["name"]: each.get("valueFrom", {}).get("configMapKeyRef") for each in container.get("env", [])}
    if not (chosen := picks.get("MODEL")) or ("ConfigMap", chosen["name"]) not in held:
        return
    entries = entry_texts(held["ConfigMap", chosen["name"]])
    name = f"ConfigMap {chosen['name']}"
    revision = (picks.get("REVISION") or {}).get("key", "")
    if revision in entries and not re.fullmatch(COMMIT, entries[revision]):
        what = f"{name}: {revision} is {entries[revision] or 'empty'}, which is no full commit hash (40 hexadecimal digits)"
        remedy = "set it to the newest hash of the model's page under Files, History; the files under a branch or tag can change"
        yield Finding(not entries[revision], what, remedy)


def class_findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
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


def quota_findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Requests of all pods and sizes of all volumes that the namespace's quotas do not allow."""
    asked = _requested(overlay)
    for quota in cluster.listed.get("resourcequotas", ()):
        if quota.get("spec", {}).get("scopes") or quota.get("spec", {}).get("scopeSelector"):
            continue  # it applies only to some pods
        for resource, hard in (quota["spec"].get("hard") or {}).items():
            name = resource.removeprefix("requests.")
            wants = asked.get(name, 0.0)
            if wants > quantity(hard):
                what = f"ResourceQuota {quota['metadata']['name']} allows {shown(name, quantity(hard))} {resource} and the overlay"
                remedy = "have it raised, or remove nodes from the overlay"
                yield Finding(True, f"{what} asks for {shown(name, wants)}", remedy)


def _requested(overlay: Overlay) -> dict[str, float]:
    """The requests of all pods, and the size of all volumes."""
    total: dict[str, float] = {}
    for workload in overlay.workloads():
        for resource, amount in workload.requests().items():
            total[resource] = total.get(resource, 0.0) + amount * workload.replicas
    return total | {"storage": sum(each.copies * each.storage for each in overlay.claims())}


_DEFAULT = "storageclass.kubernetes.io/is-default-class"
ONE_MACHINE = {
    "cinder.csi.openstack.org",
    "csi.hetzner.cloud",
    "disk.csi.azure.com",
    "dobs.csi.digitalocean.com",
    "ebs.csi.aws.com",
    "kubernetes.io/aws-ebs",
    "kubernetes.io/azure-disk",
    "kubernetes.io/gce-pd",
    "linodebs.csi.linode.com",
    "local.csi.openebs.io",
    "openebs.io/local",
    "pd.csi.storage.gke.io",
    "rancher.io/local-path",
    "topolvm.io",
}
"""Provisioners of volumes that only one machine at a time can mount; they refuse ReadWriteMany."""
NETWORK_FILES = {
    "efs.csi.aws.com",
    "file.csi.azure.com",
    "filestore.csi.storage.gke.io",
    "fsx.csi.aws.com",
    "nfs.csi.k8s.io",
    "smb.csi.k8s.io",
    "cluster.local/nfs-subdir-external-provisioner",
}
"""Network file systems: many machines can mount them, but NATS is slow and unsafe on them."""
_MANY = "ReadWriteMany"
_ANOTHER = "name a class that many machines can mount (NFS, CephFS, EFS, Filestore, Azure Files) in the claim's storageClassName"


def storage_findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Findings about claims that are not bound yet."""
    if not cluster.knows("storageclasses"):
        return
    claims = [each for each in overlay.claims() if not _is_bound(each, cluster)]
    default = next((each for each in cluster.listed["storageclasses"] if _is_default(each)), None)
    if default is None and (nameless := [each.name for each in claims if each.storage_class is None]):
        what = f"the cluster has no default storage class, and {listed(nameless)} {agree(nameless, 'names', 'name')} none"
        yield Finding(True, what, f"set storageClassName, or mark a class with {_DEFAULT}=true")
    absent = {
        each.storage_class for each in claims if each.storage_class and cluster.find("storageclasses", each.storage_class) is None
    }
    for name in sorted(filter(None, absent)):
        names = [each.name for each in claims if each.storage_class == name]
        there = listed(cluster.names("storageclasses")) or "none"
        yield Finding(True, f"storage class {name} of {listed(names)} does not exist", f"choose one that does: {there}")
    yield from _abilities(claims, default, cluster)


def _abilities(claims: list[Claim], default: Object | None, cluster: Cluster) -> Iterator[Finding]:
    """Claims that their class's provisioner is known to refuse."""
    unable: dict[tuple[str, str], list[str]] = {}
    for each in claims:
        used = cluster.find("storageclasses", each.storage_class) if each.storage_class else default
        if used is None:
            continue
        provisioner, name = str(used["provisioner"]), str(used["metadata"]["name"])
        if _MANY in each.access_modes and provisioner in ONE_MACHINE:
            unable.setdefault((name, provisioner), []).append(each.name)
        elif _MANY in each.access_modes and provisioner == "kubernetes.io/no-provisioner":
            yield Finding(False, f"nothing provisions volumes of class {name}", f"make one for {each.name} by hand, with {_MANY}")
        if each.workload == "nats" and provisioner in NETWORK_FILES:
            what = f"{each.name} would be on {name} ({provisioner}), a network file system"
            yield Finding(False, what, "give NATS fast local or block storage")
    for (name, provisioner), names in unable.items():
        asks = agree(names, "asks", "ask")
        yield Finding(True, f"{listed(names)} {asks} for {_MANY}, which the class {name} ({provisioner}) refuses", _ANOTHER)


def _there(claim: Claim, cluster: Cluster) -> list[Object | None]:
    names = [claim.name] if not claim.workload else [f"{claim.name}-{index}" for index in range(claim.copies)]
    return [cluster.find("persistentvolumeclaims", name) for name in names]


def _is_bound(claim: Claim, cluster: Cluster) -> bool:
    return all(each is not None and each.get("status", {}).get("phase") == "Bound" for each in _there(claim, cluster))


def _is_default(each: Object) -> bool:
    return (each["metadata"].get("annotations") or {}).get(_DEFAULT) == "true"


GPU = "nvidia.com/gpu"
_ADD = "add machines, or ask for less in the node's kustomization.yaml"
_NO_GPU = (
    "install NVIDIA's device plugin or GPU operator where there are GPUs; `kubectl describe node` lists them under Allocatable"
)


def machine_findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Find what the scheduler would report about each pod on otherwise empty machines, and about
    all pods together. Resources that other pods use are ignored.
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


_NAMESPACE = "kubernetes.io/metadata.name"
_ALLOW = "add it to k8s/components/network-policy/default-deny.yaml; else pods resolve no names and report `cannot connect` to nats"


def dns_findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Findings about DNS; none if no policy limits what pods may reach."""
    policies = [each for each in overlay.with_kind("NetworkPolicy") if "Egress" in each["spec"].get("policyTypes", [])]
    if not policies or not cluster.knows("dns"):
        return
    peers = [
        peer
        for policy in policies
        for rule in policy["spec"].get("egress", [])
        if _is_for_names(rule)
        for peer in rule.get("to", [])
    ]
    namespaces = {peer.get("namespaceSelector", {}).get("matchLabels", {}).get(_NAMESPACE) for peer in peers}
    networks = [ipaddress.ip_network(peer["ipBlock"]["cidr"]) for peer in peers if "ipBlock" in peer]
    servers = cluster.listed["dns"]
    if not servers:
        what = "no pod answers DNS here, so something outside the pods does (GKE's Cloud DNS: 169.254.169.254)"
        yield Finding(False, what, f"if pods resolve no names, take the address from a pod's /etc/resolv.conf and {_ALLOW}")
    pods = [each for each in servers if not each["spec"].get("hostNetwork")]
    if closed := {each["metadata"]["namespace"] for each in pods} - namespaces:
        yield Finding(True, f"DNS is in the namespace {listed(closed)}, which the network policy does not let pods reach", _ALLOW)
    addresses = {address for each in servers if each["spec"].get("hostNetwork") for address in _link_local(each)}
    for address in sorted(addresses):
        if not any(ipaddress.ip_address(address) in network for network in networks):
            yield Finding(
                True, f"DNS answers at {address} on each machine, which the network policy does not let pods reach", _ALLOW
            )


def _is_for_names(rule: Object) -> bool:
    return any(port.get("port") in (53, "dns") for port in rule.get("ports", []))


def _link_local(pod: Object) -> set[str]:
    """The address that NodeLocal DNSCache listens on besides the Service's."""
    told = " ".join(str(word) for each in pod["spec"]["containers"] for word in [*each.get("command", []), *each.get("args", [])])
    return set(re.findall(r"169\.254\.\d+\.\d+", told))
