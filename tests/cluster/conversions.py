"""What an old API server does not know, said and left out: the overlays name versions of 1.27 and
newer, Debian's control plane is 1.20.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

Object = dict[str, Any]

OLDER = {"policy/v1": "policy/v1beta1", "autoscaling/v2": "autoscaling/v2beta2"}
CLAIM_RETENTION_SINCE, POD_SECURITY_SINCE, MIN_DOMAINS_SINCE = 23, 23, 25
FAKE = "swarm-rl.dev/fake-machine"
"""Label and taint of fake machines in a cluster that has others too."""


def for_server(objects: Iterable[Object], versions: set[str], minor: int) -> tuple[list[Object], list[str]]:
    """The objects as a server of 1.`minor` with these `group/version`s takes them, and what was
    changed.
    """
    changed, notes = [], set()
    for original in objects:
        each = deepcopy(original)
        older = OLDER.get(each["apiVersion"])
        if older and each["apiVersion"] not in versions:
            notes.add(f"{each['kind']} as {older} instead of {each['apiVersion']}")
            each["apiVersion"] = older
        spec = each.get("spec", {})
        if (
            minor < CLAIM_RETENTION_SINCE
            and each["kind"] == "StatefulSet"
            and spec.pop("persistentVolumeClaimRetentionPolicy", None)
        ):
            notes.add("StatefulSets without persistentVolumeClaimRetentionPolicy (whose value is the default)")
        if minor < MIN_DOMAINS_SINCE:
            for spread in _pod(each).get("topologySpreadConstraints", []):
                if spread.pop("minDomains", None):
                    notes.add("topology spread without minDomains")
        changed.append(each)
    return changed, sorted(notes)


def not_shown(minor: int) -> list[str]:
    """Return what this control plane cannot show, whatever is applied to it."""
    missing = ["network policies: no network plugin enforces them", "autoscaling: no metrics-server gives it figures"]
    if minor < POD_SECURITY_SINCE:
        missing.append("the namespace's Pod Security labels: 1.20 has no such admission")
    if minor < MIN_DOMAINS_SINCE:
        missing.append("minDomains: 1.20 has no such field")
    return missing


def kept_to_fake_machines(objects: Iterable[Object]) -> list[Object]:
    """For a cluster with machines of its own: every pod goes to fake ones, which it tolerates."""
    changed = []
    for original in objects:
        each = deepcopy(original)
        pod = _pod(each)
        if pod:
            pod.setdefault("nodeSelector", {})[FAKE] = "true"
            pod.setdefault("tolerations", []).append({"key": FAKE, "operator": "Exists"})
        changed.append(each)
    return changed


def _pod(each: Object) -> Object:
    template = each.get("spec", {}).get("template", {}) if each["kind"] in ("Deployment", "StatefulSet", "Job", "DaemonSet") else {}
    pod: Object = template.get("spec", {})
    return pod
