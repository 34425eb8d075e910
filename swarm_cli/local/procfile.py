"""The processes of a swarm on one machine, as Procfile lines: one NATS server, four services per
node, one progress view; and their ports.

`swarm up` runs exactly these lines, and the checked-in `Procfile` is their rendering for two nodes.
Runs differ only in environment variables (`SWARM_NODE__RUN`, `SWARM_TRAINER__MAX_STEPS`, ...), so
`honcho start` can run the same swarm.
"""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.roles import ROLES, Role
from shared.runtime.health import port_holder
from swarm_cli.console import count
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG, NATS_CONFIG, shown

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

# Some of reasoning-gym's datasets derive the same task everywhere only under hash seed 0.
_PYTHON = "PYTHONHASHSEED=0 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"

_HEADER = """\
# A NATS server, {nodes} of four services each, and a progress view. Written by
# `swarm up --print-procfile`; a test keeps it so.
#
# Set from outside:  SWARM_NODE__RUN (name of the run; the same name continues it), SWARM_TRAINER__MAX_STEPS (number of steps),
# SWARM_CONFIG (another configuration), OMP_NUM_THREADS (1 suits a small machine that runs all of this).
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of a swarm on one machine, their ports, server and configuration. `nats_url` names
    a server that is already running; None starts one on `nats_port`. `base_port` 0 lets each
    process take any free port. `config` and `var_dir` are used in a line if `SWARM_CONFIG` and
    `SWARM_NODE__VAR_DIR` are not set. `names`: names of the first nodes, instead of alpha, beta and
    so on. `roles`: the services of each node.
    """

    nodes: int = 2
    nats_port: int = DEFAULT_NATS_PORT
    base_port: int = DEFAULT_BASE_PORT
    nats_url: str | None = None
    progress: bool = True
    config: Path = DEMO_CONFIG
    var_dir: Path = Path("var")
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
    """Shell command of every process by its name, in the order in which they start."""
    lines = {} if layout.nats_url else {SERVER: _nats(layout)}
    for position, node in enumerate(layout.node_names):
        for role in layout.roles:
            lines[f"{node}-{role}"] = _service(layout, position, node, role)
    if layout.progress:
        lines[VIEW] = f"{_environment(layout, 0)} exec python -m swarm_cli progress {' '.join(layout.node_names)}"
    return lines


def node_of(process: str) -> str:
    """The node that a process belongs to: alpha for `alpha-trainer`; "" for server and view."""
    return process.rpartition("-")[0]


def render_procfile(layout: Layout) -> str:
    """The Procfile's text."""
    lines = [f"{name}: {command}\n" for name, command in process_lines(layout).items()]
    return _HEADER.format(nodes=count(layout.nodes, "node")) + "\n" + "".join(lines)


def _nats(layout: Layout) -> str:
    var_dir = _fallback("SWARM_NODE__VAR_DIR", str(layout.var_dir))
    config = shlex.quote(str(shown(NATS_CONFIG)))
    return (
        f'run="{var_dir}/runs/${{SWARM_NODE__RUN:-honcho}}" && mkdir -p "$run" && '
        "exec python -m shared.runtime.supervise --linger 3 -- "
        f'nats-server --config {config} --port {layout.nats_port} --store_dir "$run" --log "$run/nats.log" '
        # Figures at any free port; `swarm dashboard` reads it from the note in the run's folder.
        '--http_port -1 --ports_file_dir "$run"'
    )


def _service(layout: Layout, position: int, node: str, role: str) -> str:
    environment = f"SWARM_NODE__ID={node} {_environment(layout, position)} {_PYTHON}"
    return f"{environment} exec python -m shared.runtime.supervise -- python -m services.{role}"


def _environment(layout: Layout, position: int) -> str:
    return " ".join(
        (
            f'SWARM_CONFIG="{_fallback("SWARM_CONFIG", str(shown(layout.config)))}"',
            "SWARM_NODE__RUN=${SWARM_NODE__RUN:-honcho}",
            f"SWARM_NATS__NODE_URL={shlex.quote(layout.url)}",
            f'{SWARM_URL_VARIABLE}="{_fallback(SWARM_URL_VARIABLE, layout.url)}"',
            f"SWARM_HTTP__BASE_PORT={layout.http_base_port(position)}",
        )
    )


def _fallback(variable: str, value: str) -> str:
    """A shell expansion, for use in double quotes: the variable's value, or `value` if it is not
    set. A path, or the address in a run's note, may have any characters, so `value` is escaped.
    """
    escaped = re.sub(r'[$`"}\\]', r"\\\g<0>", value)
    return f"${{{variable}:-{escaped}}}"


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
