"""What a running `swarm up` or `swarm join` leaves in its run's folder for other commands: which
servers its nodes use, and the command that goes on with the run. `up.lock` says whether it still
runs (`control`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from shared.config import NodeConfig
from swarm_cli.errors import CommandError
from swarm_cli.local.control import running_runs
from swarm_cli.local.procfile import DEFAULT_NATS_PORT, Layout
from swarm_cli.replace_file import replace_file
from swarm_cli.shipped import DEMO_CONFIG, shown

NOTE = "up.json"


class RunNote(msgspec.Struct, frozen=True):
    """node_url, swarm_url: servers of the nodes' streams and of the swarm's; swarm_url "none": no
    swarm. goes_on: the command that goes on with the run.
    """

    node_url: str
    swarm_url: str
    goes_on: str


def write_note(folder: Path, note: RunNote) -> None:
    """Replace the run's note."""
    replace_file(folder / NOTE, msgspec.json.encode(note).decode() + "\n")


def read_note(folder: Path) -> RunNote | None:
    """The run's note; None where there is none, or one of another version."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=RunNote)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def note_of(layout: Layout, config: NodeConfig, goes_on: str) -> RunNote:
    """The note of nodes that run as `layout` says."""
    given = config.nats.swarm_url if "swarm_url" in config.nats.model_fields_set else layout.url
    return RunNote(layout.url, given or "none", goes_on)


def up_command(config: NodeConfig, layout: Layout) -> str:
    """The `swarm up` that starts the same nodes in the same places again."""
    return shlex.join(["swarm", "up", "--run", config.node.run, *_options(config, layout)])


def make_command(config: NodeConfig, layout: Layout) -> str:
    """The same with make."""
    flags = shlex.join(_options(config, replace(layout, nodes=Layout().nodes)))
    nodes = f" NODES={layout.nodes}" if layout.nodes != Layout().nodes else ""
    return f"make run RUN={shlex.quote(config.node.run)}{nodes}" + (f" UP_FLAGS={shlex.quote(flags)}" if flags else "")


def _options(config: NodeConfig, layout: Layout) -> Iterator[str]:
    """The options of `swarm up` that its defaults and `config` do not make up for."""
    if layout.nodes != Layout().nodes:
        yield from ("--nodes", str(layout.nodes))
    for name in layout.names and layout.node_names:
        yield from ("--name", name)
    if layout.config != shown(DEMO_CONFIG):
        yield from ("--config", str(layout.config))
    if layout.nats_url:
        yield from ("--nats-url", layout.nats_url)
    elif layout.nats_port != DEFAULT_NATS_PORT:
        yield from ("--nats-port", str(layout.nats_port))
    if layout.base_port != config.http.base_port:
        yield from ("--base-port", str(layout.base_port))


def servers(config: NodeConfig, node_url: str, swarm_url: str = "") -> tuple[str, str | None]:
    """The servers that a command looks at: the nodes' and the swarm's (None: no swarm).

    They are the ones given on the command line (`node_url`, `swarm_url`), else those that the
    configuration names, else those of the only run on this machine, else the default.

    Raises:
        CommandError: several runs are running and nothing says which is meant.
    """
    found = None if node_url or "node_url" in config.nats.model_fields_set else _only_run(config)
    node = node_url or (found.node_url if found else config.nats.node_url)
    swarm = swarm_url or node_url or (found.swarm_url if found else config.nats.swarm_url) or "none"
    return node, None if swarm == "none" else swarm


def _only_run(config: NodeConfig) -> RunNote | None:
    noted = [(folder, note) for folder in running_runs(config.node.var_dir) if (note := read_note(folder))]
    if len(noted) > 1:
        lines = [f"  --node-url {note.node_url}   run {folder.name}" for folder, note in noted]
        raise CommandError("several runs are running here: say which is meant with one of\n" + "\n".join(lines))
    return noted[0][1] if noted else None
