"""Checks whether the overlay's network policy lets pods reach this cluster's DNS servers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from swarm_cli.k8s.check.cluster import Cluster, Object
from swarm_cli.k8s.check.findings import Finding, listed
from swarm_cli.k8s.check.overlay import Overlay

_NAMESPACE = "kubernetes.io/metadata.name"
_ALLOW = "add it to k8s/components/network-policy/default-deny.yaml; else pods resolve no names and report `cannot connect` to nats"


def findings(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
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
