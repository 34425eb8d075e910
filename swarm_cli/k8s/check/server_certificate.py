"""Checks the certificate of the overlay's servers, and whether clients trust it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from swarm_cli.k8s import certificates
from swarm_cli.k8s.check.cluster import Cluster
from swarm_cli.k8s.check.findings import Finding, agree, listed
from swarm_cli.k8s.check.overlay import Overlay
from swarm_cli.k8s.check.told import entry_texts, variables
from swarm_cli.k8s.secret_objects import AUTHORITY, SERVER_TLS

_TLS_HOST = re.compile(r"tls://([A-Za-z0-9.-]+)")
_NAME = f"Secret {SERVER_TLS}"
_ANEW = "run `swarm k8s secrets` again where keys/ca.key is, apply its output, and reload the servers"


def findings(overlay: Overlay, cluster: Cluster, now: datetime) -> Iterator[Finding]:
    """Findings about Secret `nats-server-tls` and the authority that clients trust."""
    secret = cluster.find("secrets", SERVER_TLS)
    if secret is None:
        return
    entries = entry_texts(secret)
    try:
        yield from _certificate(entries, _asked_names(overlay), now)
    except certificates.CertificateError as error:
        yield Finding(True, f"{_NAME}: tls.crt or tls.key cannot be read: {error}", _ANEW)
        return
    trusted = cluster.find("configmaps", AUTHORITY)
    if trusted is None or not any(each.name == AUTHORITY for each in overlay.references()):
        return
    try:
        accepted = certificates.leads_to(entries["tls.crt"], entry_texts(trusted).get("ca.crt", ""))
    except certificates.CertificateError:
        return  # told with the ConfigMap's entries
    if not accepted:
        what = f"ConfigMap {AUTHORITY}: ca.crt is another authority than the one that signed {SERVER_TLS}, and no client connects"
        yield Finding(True, what, f"{_ANEW}; restart the pods, which read the authority when they start")


def _asked_names(overlay: Overlay) -> list[str]:
    """The names by which the overlay's containers connect to its servers over TLS."""
    services = {each["metadata"]["name"] for each in overlay.with_kind("Service")}
    found = {"nats"}
    for workload in overlay.workloads():
        for container in workload.containers:
            words = [each.value for each in variables(overlay, workload, container).values()]
            for word in [*words, *container.get("command", []), *container.get("args", [])]:
                found |= {host for host in _TLS_HOST.findall(str(word)) if host.split(".")[0] in services}
    return sorted(found)


def _certificate(entries: dict[str, str], asked: list[str], now: datetime) -> Iterator[Finding]:
    """Check the servers' certificate the way a client will that knows them by a name in `asked`."""
    certificate, key, authority = (entries.get(name, "") for name in ("tls.crt", "tls.key", "ca.crt"))
    said = certificates.read(certificate)
    if said.not_after <= now:
        yield Finding(True, f"{_NAME}: the certificate expired on {said.not_after:%Y-%m-%d}, and no client can connect", _ANEW)
    elif said.not_after - now < certificates.RENEWED_WITHIN:
        yield Finding(False, f"{_NAME}: the certificate expires on {said.not_after:%Y-%m-%d}", _ANEW)
    if not certificates.belongs(key, certificate):
        yield Finding(True, f"{_NAME}: tls.key is not the key of tls.crt, and no server starts", _ANEW)
    if missing := [each for each in asked if each not in said.names]:
        names = f"{agree(missing, 'name', 'names')} {listed(missing)}"
        what = f"{_NAME}: the certificate lacks the {names}, by which pods connect, and they refuse the servers"
        yield Finding(True, what, f"{_ANEW} (with --namespace, or --server-name for another name)")
    try:
        if authority and not certificates.is_signed_by(certificate, authority):
            yield Finding(False, f"{_NAME}: ca.crt did not sign tls.crt directly", "ignore this if an intermediate certificate did")
    except certificates.CertificateError as error:
        yield Finding(True, f"{_NAME}: ca.crt cannot be read, and no server starts: {error}", _ANEW)
