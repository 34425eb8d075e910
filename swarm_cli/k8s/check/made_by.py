"""What makes an object that pods need but the overlay does not have. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_cli.k8s.check.overlay import Overlay, Reference
from swarm_cli.k8s.secret_objects import ACCOUNTS, ACCOUNTS_FILE, SIGNING, expected
from swarm_cli.nats.server_config import UpstreamNode

MAKE = "run `swarm k8s secrets --nodes ... | kubectl apply --server-side --filename -`"
_HUB, _HUB_KEYS = "nats-hub", "nats-hub-keys"
_URL = "tls://HOST:4222"
_LITERALS = {"url": _URL}
"""Entries that are given as text; all others are files."""


def made_by_apply(overlay: Overlay, reference: Reference) -> bool:
    """Whether cert-manager makes the object when the overlay is applied."""
    return reference.kind == "Secret" and reference.name in {
        each["spec"].get("secretName") for each in overlay.with_kind("Certificate")
    }


def how_made(overlay: Overlay, reference: Reference) -> str:
    """The command that makes an object, as a remedy."""
    create = f"kubectl -n {overlay.namespace} create"
    if reference.use == "pull":
        login = "--docker-server=... --docker-username=... --docker-password=..."
        return f"run `{create} secret docker-registry {reference.name} {login}`"
    if (reference.kind, reference.name) == ("Secret", ACCOUNTS) and _is_leaf(overlay):
        accounts = (
            f"swarm nats config --accounts-only --plane node --nodes {','.join(overlay.nodes())} --hub-url tls://HOST:7422 "
            f"--hub-ca /etc/{_HUB}/ca.crt --out {ACCOUNTS_FILE}"
        )
        return f"run `{accounts}` and `{create} secret generic {ACCOUNTS} --from-file={ACCOUNTS_FILE}`"
    kind = "secret generic" if reference.kind == "Secret" else "configmap"
    if (entries := _by_hand(overlay).get((reference.kind, reference.name))) is not None:
        sources = " ".join(f"--from-{_source(key)}={key}={value}" for key, value in entries.items())
        return f"run `{create} {kind} {reference.name} {sources}`"
    if _is_made_by_secrets(overlay, reference):
        return MAKE
    sources = " ".join(f"--from-file={key}=FILE" for key in sorted(reference.keys)) or "..."
    return f"nothing in Swarm makes it: run `{create} {kind} {reference.name} {sources}`"


def how_added(overlay: Overlay, reference: Reference, key: str) -> str:
    """The command that writes one entry of an object and keeps the others, as a remedy."""
    kind = reference.kind.lower()
    entries = _by_hand(overlay).get((reference.kind, reference.name), {})
    if key in entries:
        patch = f"kubectl -n {overlay.namespace} patch {kind} {reference.name} --patch"
        if _source(key) == "literal":
            return f"""run `{patch} '{{"stringData":{{"{key}":"{entries[key]}"}}}}'`"""
        if reference.kind == "Secret":
            return f"""run `{patch} '{{"data":{{"{key}":"'$(base64 -w0 {entries[key]})'"}}}}'`"""
    elif _is_made_by_secrets(overlay, reference):
        return how_made(overlay, reference)
    return f"write it with `kubectl -n {overlay.namespace} edit {kind} {reference.name}`"


def _by_hand(overlay: Overlay) -> Mapping[tuple[str, str], Mapping[str, str]]:
    """Objects made by hand (docs/kubernetes-change.md, "Join from outside the cluster"): for each
    entry the file, or the text.
    """
    found: dict[tuple[str, str], dict[str, str]] = {
        ("ConfigMap", _HUB): {"ca.crt": "hub-ca.crt"},
        ("Secret", _HUB_KEYS): {UpstreamNode(node, "").seed_variable: f"keys/{node}/swarm.nk" for node in overlay.nodes()},
    }
    for node in overlay.nodes():
        found["Secret", f"{node}-swarm"] = {"url": _URL, "swarm.nk": f"keys/{node}/swarm.nk", "ca.crt": "hub-ca.crt"}
    if not _has_accounts(overlay):
        signing = [each for each in expected(overlay.nodes()) if each.node and each.name == f"{each.node}-{SIGNING}"]
        found |= {("Secret", each.name): {key: f"keys/{file}" for key, file in each.files.items()} for each in signing}
    return found


def _is_made_by_secrets(overlay: Overlay, reference: Reference) -> bool:
    return any((each.kind, each.name) == (reference.kind, reference.name) for each in expected(overlay.nodes()))


def _is_leaf(overlay: Overlay) -> bool:
    return any((each.kind, each.name) == ("ConfigMap", _HUB) for each in overlay.references())


def _has_accounts(overlay: Overlay) -> bool:
    """Whether its servers know users. If not, `swarm k8s secrets` makes much that is not needed."""
    return any((each.kind, each.name) == ("Secret", ACCOUNTS) for each in overlay.references())


def _source(key: str) -> str:
    return "literal" if key in _LITERALS else "file"
