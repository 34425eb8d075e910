"""What a running `swarm up` or `swarm join` leaves in its run's folder for other commands: which
servers its nodes use, and the command that goes on with the run. `up.lock` says whether it still
runs (`run_control`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.config import NodeConfig
from swarm_cli.errors import CommandError
from swarm_cli.replace_file import replace_file
from swarm_cli.run_control import running_runs

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
