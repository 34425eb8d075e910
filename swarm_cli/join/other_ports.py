"""What to do if the ports of a joining node are taken on this machine."""

from __future__ import annotations

import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from swarm_cli.local.ports import OTHER_PORTS


def other_ports(hub_urls: str, wanted: Collection[int]) -> str:
    """The remedy if some of the `wanted` ports are taken. The hub's own machine may be this one:
    its server must go on, so nobody is told to stop it.

    hub_urls: the hub's address, or several separated by commas, as a token has them.
    """
    for url in hub_urls.split(","):
        hub = urlsplit(url)
        if hub.port in wanted and hub.hostname and _is_this_machine(hub.hostname):
            return (
                f"port {hub.port} is that of the hub itself ({url}), which is on this machine and has to go on; "
                f"this node has a server of its own: choose other ports with {OTHER_PORTS}"
            )
    return f"stop those processes, or choose other ports with {OTHER_PORTS}"


def _is_this_machine(host: str) -> bool:
    """Whether `host` is a name or an address of this machine: only those can be listened on."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_be_bound(family, address) for family, _, _, _, address in found)


def _can_be_bound(family: int, address: object) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)  # type: ignore[arg-type]
    except OSError:
        return False
    return True
