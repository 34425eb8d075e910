"""Checks the Secrets and ConfigMaps that pods mount or read: missing, incomplete or unusable."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from shared.identity.keys import is_public_key, is_seed
from swarm_cli.k8s import certificates
from swarm_cli.k8s.check import server_certificate
from swarm_cli.k8s.check.cluster import Cluster, Object
from swarm_cli.k8s.check.findings import Finding, agree, listed
from swarm_cli.k8s.check.made_by import MAKE, how_added, how_made, made_by_apply
from swarm_cli.k8s.check.overlay import Overlay, Reference
from swarm_cli.k8s.check.told import entry_texts
from swarm_cli.k8s.secret_objects import ACCOUNTS_FILE, SERVER_TLS, SIGNING
from swarm_cli.nats.server_config import MAX_CONNECTIONS_VARIABLE

_KINDS = {"Secret": "secrets", "ConfigMap": "configmaps"}
_WITHOUT = {
    "volume": "pods stay in ContainerCreating",
    "variable": "containers stay in CreateContainerConfigError",
    "pull": "pods stay in ErrImagePull or ImagePullBackOff",
}
_READS = {"volume": "mounts", "variable": "reads"}
_NKEY = re.compile(r"^\s*nkey: (\S+)$", re.MULTILINE)
_SERVER = re.compile(r"(nats|tls)://[^\s/@,]+:\d+")


def findings(overlay: Overlay, cluster: Cluster, now: datetime) -> Iterator[Finding]:
    """Findings about objects that the overlay's pods need to start but the overlay lacks."""
    references = overlay.references()
    for kind, kinds in _KINDS.items():
        if not cluster.knows(kinds):
            continue
        wanted = [each for each in references if each.kind == kind]
        yield from _missing(overlay, [each for each in wanted if cluster.find(kinds, each.name) is None])
        found = {}
        for each in wanted:
            if (there := cluster.find(kinds, each.name)) is not None:
                yield from _without_entry(overlay, each, there, references[each])
                found[each.name] = (each, there, references[each])
        for reference, there, workloads in found.values():
            yield from _contents(overlay, cluster, reference, there, workloads)
    yield from _addresses(overlay, cluster)
    if any(each.name == SERVER_TLS for each in references):
        yield from server_certificate.findings(overlay, cluster, now)


def _missing(overlay: Overlay, missing: Sequence[Reference]) -> Iterator[Finding]:
    """Objects that are not there: those with the same remedy and consequence together."""
    together: dict[tuple[str, bool, str, str], list[str]] = {}
    uses = {name: [each.use for each in missing if each.name == name] for name in (each.name for each in missing)}
    for each in {each.name: each for each in missing}.values():
        first = next(use for use in _WITHOUT if use in uses[each.name])
        if made_by_apply(overlay, each):
            case = (each.kind, False, "cert-manager makes it", "if it is missing after `kubectl apply`, look at its Certificate")
        else:
            case = (each.kind, True, _WITHOUT[first], how_made(overlay, each))
        together.setdefault(case, []).append(each.name)
    for (kind, stops, so, remedy), names in together.items():
        what = f"{kind}{agree(names, '', 's')} {listed(names)} {agree(names, 'is', 'are')} missing, and {so}"
        yield Finding(stops, what, remedy)


def _without_entry(overlay: Overlay, reference: Reference, found: Object, workloads: list[str]) -> Iterator[Finding]:
    """Entries that a pod picks but that are missing."""
    for key in sorted(reference.keys - (found.get("data") or {}).keys()):
        verb = _READS[reference.use] if len(set(workloads)) == 1 else _READS[reference.use][:-1]
        what = f"{reference.kind} {reference.name} has no entry {key}, which {listed(workloads, 2)} {verb}"
        yield Finding(True, what, how_added(overlay, reference, key))


def _contents(overlay: Overlay, cluster: Cluster, reference: Reference, found: Object, workloads: list[str]) -> Iterator[Finding]:
    """Entries that cannot be what their name says."""
    name = f"{reference.kind} {reference.name}"
    texts = entry_texts(found)
    for key, text in texts.items() if reference.kind == "Secret" else ():
        added = how_added(overlay, reference, key)
        if key.endswith(".nk") and not is_seed(text.strip()):
            what = f"{name}: {key} is not a key (a seed has 58 characters and begins with SU)"
            if added == MAKE:
                added = f"delete it and put keys/ back, or give {listed(workloads, 2)} a new one; {MAKE}"
            yield Finding(True, what, added)
        elif key == "swarm.nk" and (owner := _signing_with(text, cluster)):
            what = f"{name}: swarm.nk is the key with which a node signs (Secret {owner}), and the swarm refuses to connect it"
            yield Finding(True, what, added)
        elif key == ACCOUNTS_FILE and MAX_CONNECTIONS_VARIABLE not in text:
            yield Finding(True, f"{name}: {key} is incomplete, and no server starts with it", how_made(overlay, reference))
        elif key == ACCOUNTS_FILE and (wrong := [each for each in _NKEY.findall(text) if not is_public_key(each)]):
            what = f"{name}: {key} lists {listed(wrong, 2)}, which {agree(wrong, 'is no public key', 'are no public keys')}"
            yield Finding(True, f"{what}, and no server starts with it or reloads it", how_made(overlay, reference))
    if "ca.crt" in texts and reference.name != SERVER_TLS and (why := _no_authority(texts["ca.crt"])):
        what = f"{name}: ca.crt {why}, and {listed(workloads, 2)} cannot trust any server by it"
        yield Finding(True, what, how_added(overlay, reference, "ca.crt"))


def _no_authority(text: str) -> str:
    """Why a text is not an authority's certificate; empty if it is a certificate."""
    if "PRIVATE KEY-----" in text:
        return "holds a private key, which no pod may have, instead of the authority's certificate"
    try:
        certificates.read(text)
    except certificates.CertificateError as error:
        return f"cannot be read: {error}"
    return ""


def _signing_with(seed: str, cluster: Cluster) -> str:
    """The Secret of the node that signs with this key; empty if none does."""
    for each in cluster.listed["secrets"]:
        name = str(each["metadata"]["name"])
        if name.endswith(f"-{SIGNING}") and entry_texts(each).get("node.nk", "").strip() == seed.strip():
            return name
    return ""


def _addresses(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Servers' addresses that Secrets hold."""
    for reference in overlay.references():
        secret = cluster.find("secrets", reference.name) if (reference.kind, reference.use) == ("Secret", "variable") else None
        for key in sorted(reference.keys & {"url"}) if secret is not None else ():
            url, name = entry_texts(secret or {}).get(key), f"Secret {reference.name}: {key}"
            if url is None:
                continue  # told already
            remedy = how_added(overlay, reference, key)
            if not all(_SERVER.fullmatch(each.strip()) for each in url.split(",")):
                yield Finding(True, f"{name} is not a server's address (tls://HOST:PORT)", remedy)
            elif "nats://" in url and "ca.crt" in entry_texts(secret or {}):
                yield Finding(False, f"{name} begins with nats://, although clients with ca.crt demand TLS", remedy)
