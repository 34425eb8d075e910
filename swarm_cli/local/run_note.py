"""Writes the note that `swarm_cli.running` reads: which servers a run's nodes use, and the command
that continues the run.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from shared.config import NodeConfig
from shared.contracts.wire import DEFAULT_SWARM_ID
from swarm_cli.local.procfile import DEFAULT_NATS_PORT, SWARM_URL_VARIABLE, Layout
from swarm_cli.own_run import NOTE, mark_as_own
from swarm_cli.replace_file import replace_file
from swarm_cli.running import RunNote
from swarm_cli.shipped import DEMO_CONFIG


def write_note(folder: Path, note: RunNote) -> None:
    """Replace the run's note, as this user's own."""
    replace_file(folder / NOTE, msgspec.json.encode(note).decode() + "\n")
    mark_as_own(folder)


def note_of(layout: Layout, goes_on: str, swarm_id: str = "") -> RunNote:
    """The note for a run with this layout, whose nodes are in this swarm.

    A configuration file's `nats.swarm_url` is not where they share: the Procfile's lines take the
    variable from outside, or else the layout's server.
    """
    return RunNote(layout.url, os.environ.get(SWARM_URL_VARIABLE) or layout.url, goes_on, swarm_id, os.getcwd())


def swarm_of_run(config: NodeConfig, layout: Layout) -> dict[str, str]:
    """The environment variable that names the swarm after the run, so that a server started here
    keeps runs apart: its folder may still hold an earlier run's groups.

    Empty with somebody else's server, or if the configuration names a swarm.
    """
    if layout.nats_url or config.nats.swarm_id != DEFAULT_SWARM_ID:
        return {}
    return {"SWARM_NATS__SWARM_ID": config.node.run}


def up_command(config: NodeConfig, layout: Layout) -> str:
    """The `swarm up` command that starts the same nodes on the same ports, from any folder."""
    return shlex.join(["swarm", "up", "--run", config.node.run, *_options(config, layout)])


def make_command(config: NodeConfig, layout: Layout) -> str:
    """The same with make."""
    flags = shlex.join(_options(config, replace(layout, nodes=Layout().nodes)))
    nodes = f" NODES={layout.nodes}" if layout.nodes != Layout().nodes else ""
    return f"make run RUN={shlex.quote(config.node.run)}{nodes}" + (f" UP_FLAGS={shlex.quote(flags)}" if flags else "")


def _options(config: NodeConfig, layout: Layout) -> Iterator[str]:
    """The options of `swarm up` that its defaults and `config` do not cover."""
    if layout.nodes != Layout().nodes:
        yield from ("--nodes", str(layout.nodes))
    for name in layout.names and layout.node_names:
        yield from ("--name", name)
    file = os.path.abspath(layout.config)
    if file != str(DEMO_CONFIG):
        yield from ("--config", file)
    if layout.nats_url:
        yield from ("--nats-url", layout.nats_url)
    elif layout.nats_port != DEFAULT_NATS_PORT:
        yield from ("--nats-port", str(layout.nats_port))
    if layout.base_port != config.http.base_port:
        yield from ("--base-port", str(layout.base_port))
