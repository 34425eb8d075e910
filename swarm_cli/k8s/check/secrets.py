"""Secrets and ConfigMaps that pods mount or read: missing, incomplete or unusable; the certificate
of the servers, and whether clients trust it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from shared.identity.keys import is_public_key, is_seed
from swarm_cli.k8s import certificates
from swarm_cli.k8s.check.cluster import Cluster, Object
from swarm_cli.k8s.check.overlay import Finding, Overlay, Reference, agree, entry_texts, listed, variables
from swarm_cli.k8s.secret_objects import ACCOUNTS, ACCOUNTS_FILE, AUTHORITY, SERVER_TLS, SIGNING, expected
from swarm_cli.nats.server_config import MAX_CONNECTIONS_VARIABLE

MAKE = "run `swarm k8s secrets --nodes ... | kubectl apply --server-side --filename -`"
HUB = "nats-hub"
"""The ConfigMap with the authority of a hub, which only leaf servers mount."""


def made_by_apply(overlay: Overlay, reference: Reference) -> bool:
    """Return whether cert-manager makes the object when the overlay is applied."""
    return reference.kind == "Secret" and reference.name in {
        each["spec"].get("secretName") for each in overlay.with_kind("Certificate")
    }


def how_made(overlay: Overlay, reference: Reference) -> str:
    """The command that makes an object, as a remedy."""
    if reference.use == "pull":
        login = "--docker-server=... --docker-username=... --docker-password=..."
        return f"run `kubectl -n {overlay.namespace} create secret docker-registry {reference.name} {login}`"
    if reference.name in _made_by_hand(overlay):
        return 'make it by hand (docs/kubernetes-change.md, "Join from outside the cluster")'
    if (reference.kind, reference.name) in {(each.kind, each.name) for each in expected(overlay.nodes())}:
        return MAKE
    kind = "secret generic" if reference.kind == "Secret" else "configmap"
    sources = " ".join(f"--from-file={key}=FILE" for key in sorted(reference.keys)) or "..."
    return f"nothing in Swarm makes it: run `kubectl -n {overlay.namespace} create {kind} {reference.name} {sources}`"


def how_added(overlay: Overlay, reference: Reference, key: str) -> str:
    """Describe how one entry of an object is corrected."""
    made = how_made(overlay, reference)
    return (
        made
        if made == MAKE
        else f"write {key} with `kubectl -n {overlay.namespace} edit {reference.kind.lower()} {reference.name}`"
    )


def _made_by_hand(overlay: Overlay) -> set[str]:
    """Names of the objects with which nodes join a hub elsewhere."""
    names = {each.name for each in overlay.references()}
    found = {HUB, f"{HUB}-keys", *(f"{node}-swarm" for node in overlay.nodes())}
    if HUB in names:
        found.add(ACCOUNTS)
    if ACCOUNTS not in names:  # its servers know no users, and `swarm k8s secrets` makes much that is not needed
        found |= {f"{node}-{SIGNING}" for node in overlay.nodes()}
    return found


_TLS_HOST = re.compile(r"tls://([A-Za-z0-9.-]+)")
_NAME = f"Secret {SERVER_TLS}"
_ANEW = "run `swarm k8s secrets` again where keys/ca.key is, apply its output, and reload the servers"


def certificate_findings(overlay: Overlay, cluster: Cluster, now: datetime) -> Iterator[Finding]:
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


_KINDS = {"Secret": "secrets", "ConfigMap": "configmaps"}
_WITHOUT = {
    "volume": "pods stay in ContainerCreating",
    "variable": "containers stay in CreateContainerConfigError",
    "pull": "pods stay in ErrImagePull or ImagePullBackOff",
}
_READS = {"volume": "mounts", "variable": "reads"}
_NKEY = re.compile(r"^\s*nkey: (\S+)$", re.MULTILINE)
_SERVER = re.compile(r"(nats|tls)://[^\s/@,]+:\d+")


def mounted_findings(overlay: Overlay, cluster: Cluster, now: datetime) -> Iterator[Finding]:
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
        yield from certificate_findings(overlay, cluster, now)


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
