"""Checks the Secrets and ConfigMaps that pods mount: missing, incomplete, unreadable or expired."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from datetime import datetime

from shared.identity.keys import is_seed
from swarm_cli.k8s import certificates
from swarm_cli.k8s.check.cluster import Cluster, Object
from swarm_cli.k8s.check.findings import Finding, listed
from swarm_cli.k8s.check.overlay import Overlay, Reference
from swarm_cli.k8s.check.told import variables
from swarm_cli.nats.accounts import MAX_CONNECTIONS_VARIABLE

_MAKE = "`swarm k8s secrets --nodes ... | kubectl apply --server-side --filename -` makes them"
_TLS_HOST = re.compile(r"tls://([A-Za-z0-9.-]+)")
_KINDS = {"Secret": "secrets", "ConfigMap": "configmaps"}


def findings(overlay: Overlay, cluster: Cluster, now: datetime) -> Iterator[Finding]:
    """Findings about objects that the overlay's pods need to start but the overlay lacks."""
    references = overlay.references()
    for kind, kinds in _KINDS.items():
        if not cluster.knows(kinds):
            continue
        wanted = [each for each in references if each.kind == kind]
        if missing := {each.name for each in wanted if cluster.find(kinds, each.name) is None}:
            are = "is" if len(missing) == 1 else "are"
            yield Finding(True, f"{kind} {listed(missing)} {are} missing, and pods stay in ContainerCreating", _MAKE)
        for each in wanted:
            if (found := cluster.find(kinds, each.name)) is not None:
                yield from _contents(each, found, references[each])
    if (server := cluster.find("secrets", "nats-server-tls")) and any(each.name == "nats-server-tls" for each in references):
        yield from _certificate(server, _asked_names(overlay), now)


def _contents(reference: Reference, found: Object, workloads: list[str]) -> Iterator[Finding]:
    """Entries that a pod picks but that are missing, and keys that are not valid."""
    entries = found.get("data") or {}
    for key in sorted(reference.keys - entries.keys()):
        what = f"{reference.kind} {reference.name} has no entry {key}, which {listed(workloads, 2)} mounts"
        yield Finding(True, what, f"delete it; {_MAKE}")
    for key in entries if reference.kind == "Secret" else ():
        text = _text(entries[key])
        if key.endswith(".nk") and not is_seed(text.strip()):
            what = f"Secret {reference.name}: {key} is not a key (a seed has 58 characters and begins with SU)"
            yield Finding(True, what, f"delete it and put keys/ back, or give {listed(workloads, 2)} a new one; {_MAKE}")
        elif key == "accounts.conf" and MAX_CONNECTIONS_VARIABLE not in text:
            yield Finding(True, f"Secret {reference.name}: accounts.conf is incomplete, and no server starts with it", _MAKE)


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


def _certificate(secret: Object, asked: list[str], now: datetime) -> Iterator[Finding]:
    """Check the servers' certificate the way a client will that knows them by a name in `asked`."""
    entries = {key: _text(value) for key, value in (secret.get("data") or {}).items()}
    certificate, key, authority = (entries.get(name, "") for name in ("tls.crt", "tls.key", "ca.crt"))
    name = "Secret nats-server-tls"
    anew = "run `swarm k8s secrets` again where keys/ca.key is, apply its output, and reload the servers"
    try:
        said = certificates.read(certificate)
        if said.not_after <= now:
            yield Finding(True, f"{name}: the certificate expired on {said.not_after:%Y-%m-%d}, and no client can connect", anew)
        elif said.not_after - now < certificates.RENEWED_WITHIN:
            yield Finding(False, f"{name}: the certificate expires on {said.not_after:%Y-%m-%d}", anew)
        if not certificates.belongs(key, certificate):
            yield Finding(True, f"{name}: tls.key is not the key of tls.crt, and no server starts", anew)
        if missing := [each for each in asked if each not in said.names]:
            what = f"{name}: the certificate lacks the name {listed(missing)}, by which pods connect, and they refuse the servers"
            yield Finding(True, what, f"{anew} (with --namespace, or --server-name for another name)")
        if authority and not certificates.is_signed_by(certificate, authority):
            yield Finding(False, f"{name}: ca.crt did not sign tls.crt directly", "ignore this if an intermediate certificate did")
    except certificates.CertificateError as error:
        yield Finding(True, f"{name}: tls.crt or tls.key cannot be read: {error}", anew)


def _text(encoded: str) -> str:
    try:
        return base64.b64decode(encoded).decode()
    except ValueError:
        return ""
