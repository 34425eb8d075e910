"""The swarm that a command looks at: that of `--node-url` or `--run`, or the only one here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from shared.config import NodeConfig
from shared.transport.base import NotConnected
from swarm_cli.errors import CommandError
from swarm_cli.looking.store_copy import STORE, StartedMeanwhile, server_on_copy
from swarm_cli.run_end import RunEnd, read_end
from swarm_cli.running import only_running, read_note, running_runs, servers

_LISTENS_S = 2.0
LookRunOption = Annotated[
    str,
    typer.Option("--run", help="Run to look at, also one that ended.  [default: the one that runs here]", show_default=False),
]


@dataclass(frozen=True, slots=True)
class Target:
    """node_url, swarm_url: servers of the nodes' streams and of the swarm's (None: no swarm). run:
    whose they are, "" where that is not known. ended: how that run ended; the server is one on a
    copy then.
    """

    node_url: str
    swarm_url: str | None
    run: str = ""
    ended: RunEnd | None = None


def default_target(config: NodeConfig, node_url: str, swarm_url: str = "") -> Target:
    """What a command looks at where no run was named. Raises CommandError: several are running."""
    node, swarm = servers(config, node_url, swarm_url)
    found = only_running(config, node_url)
    return Target(node, swarm, found.name if found else "")


def check_listening(target: Target) -> None:
    """Raises NotConnected at once where nothing listens at this machine's port, and no run that is
    starting will: who asks once should not wait for what does not come.
    """
    if "," in target.node_url:  # servers of a cluster, of which one may be away
        return
    at = urlsplit(target.node_url)
    if target.run or at.hostname not in ("127.0.0.1", "localhost", "::1") or at.port is None:
        return
    try:
        socket.create_connection((at.hostname, at.port), _LISTENS_S).close()
    except ConnectionRefusedError:
        raise NotConnected(
            f"no NATS server listens at {target.node_url}: start a swarm with `swarm up` (`make run`) in another terminal"
        ) from None
    except OSError:
        return  # the connection itself says what is wrong


@contextmanager
def looking_at(config: NodeConfig, run: str, node_url: str, swarm_url: str = "", *, only_here: bool = True) -> Iterator[Target]:
    """What a command looks at, for the length of the block. A run that is named and runs here is
    looked at as it runs; one that ended, in a copy of what its server had.

    only_here: a run that is not of this machine is refused; else it may be that of a node whose
        server is elsewhere, and only its records are here.

    Raises:
        CommandError: there is no such run, or nothing of it is left to look at.
    """
    if not run or node_url:
        yield default_target(config, node_url, swarm_url)
        return
    var_dir = config.node.var_dir
    folder = var_dir / "runs" / run
    try:
        with _named(config, folder, swarm_url, only_here=only_here) as target:
            yield target
    except StartedMeanwhile:
        raise CommandError(f"run {run} was started a moment ago: ask again") from None


@contextmanager
def _named(config: NodeConfig, folder: Path, swarm_url: str, *, only_here: bool) -> Iterator[Target]:
    """The run in `folder` was named, and no server."""
    note, var_dir = read_note(folder), config.node.var_dir
    if note is not None and folder in running_runs(var_dir):
        swarm = swarm_url or note.swarm_url
        yield Target(note.node_url, None if swarm == "none" else swarm, folder.name)
    elif (folder / STORE).is_dir():
        elsewhere = note is not None and note.swarm_url != note.node_url  # a hub, which outlives the run
        with server_on_copy(folder, var_dir) as url:
            swarm = swarm_url or (note.swarm_url if note is not None and elsewhere else url)
            end = read_end(folder) or RunEnd("killed", folder.stat().st_mtime)
            yield Target(url, None if swarm == "none" else swarm, folder.name, end)
    elif only_here:
        raise CommandError(_not_here(folder, note.node_url if note else ""))
    else:
        yield default_target(config, "", swarm_url)


def _not_here(folder: Path, node_url: str) -> str:
    if node_url:
        return (
            f"run {folder.name} has ended, and its streams are on the server at {node_url}, which `swarm up` did not start: "
            f"--node-url {node_url} looks there"
        )
    runs = folder.parent
    stored = sorted(runs.glob(f"*/{STORE}"), key=lambda each: each.stat().st_mtime, reverse=True)
    names = ", ".join(each.parent.name for each in stored[:5])
    return f"no run {folder.name!r} with a server's store in {runs}: {f'newest are {names}' if names else 'there is none'}"
