"""The Secrets and ConfigMaps that the manifests in k8s/ expect, the files of the key folder that
each is made from, and the names that the servers' certificate has. Pure.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from shared.roles import OPERATOR, ROLES, WATCH
from swarm_cli.errors import CommandError

SERVERS = 3
"""The number that k8s/components/nats-cluster starts."""
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
"""RFC 1123. Kubernetes wants a namespace to be one in lower case."""
_HOST_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
"""With the underscore, which container networks put into host names."""
_DNS_NAME = re.compile(rf"(?:\*\.)?(?:{_HOST_LABEL}\.)*{_HOST_LABEL}")
_DNS_CHARACTERS = 253
_DIGITS_LAST = re.compile(r"(?:.*\.)?[0-9]+")
"""No domain at the top is a number, so this is a mistyped address."""


def server_names(namespace: str, more: Sequence[str]) -> list[str]:
    """The names by which clients and other servers reach the servers. Each server is listed,
    because some TLS libraries refuse a wildcard.
    """
    servers = [f"nats-{index}.nats-headless" for index in range(SERVERS)]
    return list(dict.fromkeys(["nats", f"nats.{namespace}.svc", *servers, "localhost", "127.0.0.1", *more]))


def checked_namespace(name: str) -> str:
    """Return `name`. Raises CommandError if no Kubernetes namespace can have it."""
    if not re.fullmatch(_LABEL, name):
        raise CommandError(
            f"--namespace {name[:80]!r} is no Kubernetes namespace: give up to 63 lower-case letters, digits and hyphens, with a "
            "letter or digit at both ends"
        )
    return name


def checked_server_name(name: str) -> str:
    """Return `name`. Raises CommandError if a certificate cannot have it."""
    if not _is_server_name(name):
        raise CommandError(
            f"--server-name {name[:80]!r} is neither a DNS name nor an IP address: give one of a server, without tls:// and port"
        )
    return name


def _is_server_name(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        is_name = len(name) <= _DNS_CHARACTERS and _DNS_NAME.fullmatch(name) is not None
        return is_name and not _DIGITS_LAST.fullmatch(name)
    return True


ACCOUNTS, ACCOUNTS_FILE = "nats-accounts", "accounts.conf"
ROSTER, ROSTER_FILE = "swarm-roster", "roster.txt"
SERVER_TLS, AUTHORITY = "nats-server-tls", "nats-ca"
SIGNING = "signing"
MOST_BYTES = 2**20 - 4096
"""An object's data may have 1 MiB; 4 KiB are left for its names."""
ANNOTATION_BYTES = 256 * 1024
"""The limit on all annotations of an object; client-side `kubectl apply` keeps a copy of the object
in one.
"""

_LABELS = {"app.kubernetes.io/name": "swarm"}
"""Without `part-of`, by which docs/kubernetes-change.md removes old ConfigMaps: these stay."""
_TLS_FILES = {"tls.crt": "tls.crt", "tls.key": "tls.key", "ca.crt": "ca.crt"}


@dataclass(frozen=True, slots=True)
class Expected:
    """An object that pods mount. `files`: for each entry the file in the key folder that it is made
    from.
    """

    kind: str
    name: str
    files: Mapping[str, str]
    node: str = ""
    """The node it belongs to; empty: the whole swarm."""


def expected(nodes: Sequence[str], *, cert_manager: bool = False) -> list[Expected]:
    """Every object for a swarm of `nodes`; with `cert_manager`, without those with certificates,
    which cert-manager makes.
    """
    of_nodes = [each for node in nodes for each in _node_secrets(node)]
    shared = [
        Expected("Secret", "swarm-operator", {"swarm.nk": f"{OPERATOR}/swarm.nk"}),
        Expected("Secret", ACCOUNTS, {ACCOUNTS_FILE: ACCOUNTS_FILE}),
        Expected("Secret", "nats-watch", {"watch.nk": f"{OPERATOR}/{WATCH}.nk"}),
        Expected("ConfigMap", ROSTER, {ROSTER_FILE: ROSTER_FILE}),
    ]
    certificates = [Expected("Secret", SERVER_TLS, _TLS_FILES), Expected("ConfigMap", AUTHORITY, {"ca.crt": "ca.crt"})]
    return [*of_nodes, *shared, *([] if cert_manager else certificates)]


def as_objects(wanted: Iterable[Expected], contents: Mapping[str, str], namespace: str) -> list[dict[str, Any]]:
    """The objects in Kubernetes' format. `contents`: texts by file."""
    return [_as_object(each, {key: contents[file] for key, file in each.files.items()}, namespace) for each in wanted]


def as_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """One document each, for `kubectl apply --filename -`."""
    return yaml.safe_dump_all((dict(each) for each in objects), sort_keys=False, width=2**20)


def annotation_bytes(each: Mapping[str, Any]) -> int:
    """The size of the copy that client-side `kubectl apply` keeps in an annotation."""
    return len(json.dumps(each, separators=(",", ":")))


def _node_secrets(node: str) -> list[Expected]:
    """A Secret per role. Only the verifier gets the key for the swarm plane and the signing key."""
    keys = {role: {"node.nk": f"{node}/{role}.nk"} for role in (*ROLES, OPERATOR)}
    keys["verifier"]["swarm.nk"] = f"{node}/swarm.nk"
    keys[SIGNING] = {"node.nk": f"{node}/{SIGNING}.nk"}
    return [Expected("Secret", f"{node}-{name}", files, node) for name, files in keys.items()]


def _as_object(each: Expected, texts: Mapping[str, str], namespace: str) -> dict[str, Any]:
    secret = each.kind == "Secret"
    return {
        "apiVersion": "v1",
        "kind": each.kind,
        "metadata": {
            "name": each.name,
            "namespace": namespace,
            "labels": _LABELS | ({"swarm-rl.dev/node": each.node} if each.node else {}),
        },
        **({"type": "Opaque"} if secret else {}),
        "data": {key: base64.b64encode(text.encode()).decode() if secret else text for key, text in texts.items()},
    }
