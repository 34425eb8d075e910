"""The names that the servers' certificate has: those that `swarm k8s secrets` is given, and what is
no name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

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


def not_names(names: Iterable[str]) -> list[str]:
    """Those that are neither a DNS name nor an address, which earlier versions did take."""
    return [name for name in names if not _is_server_name(name)]


def names_of_other_namespaces(names: Iterable[str]) -> list[str]:
    """Those of the form `nats.NAMESPACE.svc`. What is left over from a mistyped --namespace is
    told; a name from --server-name is not.
    """
    return [name for name in names if re.fullmatch(rf"nats\.{_LABEL}\.svc", name)]


def _is_server_name(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        is_name = len(name) <= _DNS_CHARACTERS and _DNS_NAME.fullmatch(name) is not None
        return is_name and not _DIGITS_LAST.fullmatch(name)
    return True
