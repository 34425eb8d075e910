"""Checks whether the cluster has a storage class for each volume, and whether the class can provide
it.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm_cli.k8s.check.cluster import Cluster, Object
from swarm_cli.k8s.check.findings import Finding, agree, listed
from swarm_cli.k8s.check.overlay import Claim, Overlay

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


def findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Findings about claims that are not bound yet, and those whose class the overlay changes."""
    yield from _other_classes(overlay, cluster)
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


def _other_classes(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Claims that are there with another class than the overlay names: the API server refuses to
    change it, of a claim as of a StatefulSet's template.
    """
    changed: dict[tuple[str, str], list[str]] = {}
    for each in overlay.claims():
        for found in filter(None, _there(each, cluster)):
            has = found.get("spec", {}).get("storageClassName")
            if has and each.storage_class and has != each.storage_class:
                changed.setdefault((has, each.storage_class), []).append(found["metadata"]["name"])
    for (has, named), names in sorted(changed.items()):
        made = f"{listed(names)} {agree(names, 'was', 'were')} made with the class {has}"
        what = f"{made}, and the overlay names {named}: `kubectl apply` is refused"
        yield Finding(True, what, f"name {has}, or delete claim and StatefulSet with all that is on the volume, and apply")


def _there(claim: Claim, cluster: Cluster) -> list[Object | None]:
    names = [claim.name] if not claim.workload else [f"{claim.name}-{index}" for index in range(claim.copies)]
    return [cluster.find("persistentvolumeclaims", name) for name in names]


def _is_bound(claim: Claim, cluster: Cluster) -> bool:
    return all(each is not None and each.get("status", {}).get("phase") == "Bound" for each in _there(claim, cluster))


def _is_default(each: Object) -> bool:
    return (each["metadata"].get("annotations") or {}).get(_DEFAULT) == "true"
