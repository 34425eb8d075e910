"""Checks that the ports are free before anything starts, so that a taken port is reported in one
sentence instead of nine processes' logs.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from shared.runtime.health import port_holder
from swarm_cli.errors import CommandError

OTHER_PORTS = "--nats-port 4333 --base-port 9500"
"""Far enough from the usual ones for a second run, in the words of the command line."""


def check_ports(wanted: Mapping[int, str], remedy: str) -> None:
    """Check that every port in `wanted` (port to purpose) can be listened on at 127.0.0.1.

    Raises:
        CommandError: names each taken port, what it is needed for and, if the system shows it, the
            process that has it.
    """
    taken = [port for port in wanted if not is_free(port)]
    if taken:
        lines = [f"  port {port}, needed for {wanted[port]}, is taken{port_holder(port)}" for port in taken]
        raise CommandError("ports are taken, so nothing was started:\n" + "\n".join(lines) + f"\n{remedy}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server can listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
