"""The swarm that a command looks at: the one of `--node-url` or `--run`, or the only one here."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from shared.config import NodeConfig
from shared.text import visible
from shared.transport.base import NotConnected
from swarm_cli.console import note as tell
from swarm_cli.elsewhere import no_run_here, unnamed_server
from swarm_cli.errors import CommandError
from swarm_cli.looking.store_copy import STORE, StartedMeanwhile, server_on_copy
from swarm_cli.loopback import LOOPBACK
from swarm_cli.own_run import is_own
from swarm_cli.run_end import RunEnd, RunGone, newest_ended, read_end
from swarm_cli.running import RunNote, only_running, read_note, run_at, running_runs, servers
from swarm_cli.silent_server import naming_silent_server

_LISTENS_S = 2.0
LookRunOption = Annotated[
    str,
    typer.Option("--run", help="Run to look at, running or ended.  [default: the running one]", show_default=False),
]


@dataclass(frozen=True, slots=True)
class Target:
    """node_url, swarm_url: servers of the nodes' streams and of the swarm's (None: no swarm). run:
    the run they belong to, "" if it is not known. ended: how that run ended; the server then runs
    on a copy of its store. named: the command line or the configuration names node_url.
    """

    node_url: str
    swarm_url: str | None
    run: str = ""
    ended: RunEnd | None = None
    named: bool = False


def run_here(var_dir: Path, target: Target) -> str:
    """The running run of this machine that is looked at; empty if it has ended or is elsewhere."""
    return "" if target.ended is not None else target.run or run_at(var_dir, target.node_url)


def default_target(config: NodeConfig, node_url: str, swarm_url: str = "") -> Target:
    """What a command looks at if no run was named. Raises CommandError if several are running."""
    node, swarm = servers(config, node_url, swarm_url)
    found = only_running(config, node_url)
    named = bool(node_url) or "node_url" in config.nats.model_fields_set
    return Target(node, swarm, found.name if found else "", named=named)


def ended_here(var_dir: Path, target: Target) -> tuple[Path, RunEnd] | None:
    """The ended run, and its end, that explains why the target's server does not answer: the newest
    one of that server or, if no server was named, of any.
    """
    return None if target.run else newest_ended(var_dir, target.node_url if target.named else "")


def check_listening(var_dir: Path, target: Target, *, acts: bool = False) -> None:
    """Raises NotConnected at once if nothing listens on this machine's port and no run is about to,
    so that the user need not wait for a timeout; as RunGone if a run in `var_dir` explains it.

    If something listens, but nobody named it and no run here started it, it says whose it is.

    acts: the command changes something there, and so refuses in that case.

    Raises:
        CommandError: as said.
    """
    if target.run or "," in target.node_url:  # of several servers another may listen
        return
    at = urlsplit(target.node_url)
    if at.hostname not in LOOPBACK or at.port is None:
        return
    try:
        socket.create_connection((at.hostname, at.port), _LISTENS_S).close()
    except ConnectionRefusedError:
        if found := ended_here(var_dir, target):
            raise RunGone(*found) from None
        raise NotConnected(
            f"no NATS server listens at {target.node_url}: start a swarm with `swarm up` (`make run`) in another terminal"
        ) from None
    except OSError:
        return  # connecting will report the problem
    if not target.named:
        there = unnamed_server(var_dir, target.node_url)
        if acts:
            raise CommandError(f"{there}: if you mean that one, add --node-url {shlex.quote(target.node_url)}")
        tell(f"{there}: it is shown here. --node-url names another, --run a run of this folder")


@contextmanager
def looking_at(config: NodeConfig, run: str, node_url: str, swarm_url: str = "", *, only_here: bool = True) -> Iterator[Target]:
    """What a command looks at, for the length of the block. If the named run is running here, its
    servers; if it has ended, a copy of what its server had stored.

    only_here: refuse a run that has no server's store on this machine; else it may be the run of a
        node whose server is elsewhere, of which only the records are here. A run without either is
        always refused, because another run's data would be shown under its name.

    Raises:
        CommandError: there is no such run, or nothing of it is left to look at.
        ServerSilent: instead of a NotConnected of the block.
    """
    with _chosen(config, run, node_url, swarm_url, only_here) as target, naming_silent_server(config.node.var_dir, target.node_url):
        yield target


@contextmanager
def _chosen(config: NodeConfig, run: str, node_url: str, swarm_url: str, only_here: bool) -> Iterator[Target]:
    """As `looking_at`."""
    if not run or node_url:
        yield default_target(config, node_url, swarm_url)
        return
    var_dir = config.node.var_dir
    folder = var_dir / "runs" / run
    try:
        with _named(config, folder, swarm_url, only_here=only_here) as target:
            yield target
    except StartedMeanwhile:
        raise CommandError(f"run {run} was started a moment ago: try again") from None


@contextmanager
def _named(config: NodeConfig, folder: Path, swarm_url: str, *, only_here: bool) -> Iterator[Target]:
    """The target if the run in `folder` was named and no server was."""
    note, var_dir = read_note(folder), config.node.var_dir
    if note is not None and folder in running_runs(var_dir):
        swarm = swarm_url or note.swarm_url
        yield Target(note.node_url, None if swarm == "none" else swarm, folder.name)
    elif (folder / STORE).is_dir():
        with server_on_copy(folder, var_dir) as url:
            swarm = swarm_url or (url if note is None else _swarm_of(config, folder, note, url))
            end = read_end(folder) or RunEnd("killed", folder.stat().st_mtime)
            yield Target(url, None if swarm == "none" else swarm, folder.name, end)
    elif only_here or not folder.is_dir():
        raise CommandError(_not_here(folder, note.node_url if note else ""))
    else:
        yield replace(default_target(config, "", swarm_url), named=True)


def _swarm_of(config: NodeConfig, folder: Path, left: RunNote, copy_url: str) -> str:
    """The swarm's server of the ended run in `folder`: the copy at `copy_url`, or a hub, which may
    still run.

    The run, and so its note, may be somebody else's: then only a server that the configuration
    names is asked. A key is used only there in any case: another server could relay the real hub's
    challenge and be let in there with this key.
    """
    if left.swarm_url == left.node_url:
        return copy_url
    known = config.nats.swarm_url if "swarm_url" in config.nats.model_fields_set else None
    if left.swarm_url in ("none", known):
        return left.swarm_url
    if not config.nats.swarm_key_file:
        if is_own(folder):
            return left.swarm_url
        tell(
            f"the files of run {folder.name} were copied here or changed since its last start; its note says that its swarm was at "
            f"{left.swarm_url}, which was not asked. If you trust that server: --swarm-url {shlex.quote(left.swarm_url)}"
        )
        return "none"
    tell(
        f"the run's swarm was at {left.swarm_url}, and nats.swarm_key_file is for {known or 'another server'}: it was not asked. "
        f"To ask it with that key: --swarm-url {shlex.quote(left.swarm_url)}"
    )
    return "none"


def _not_here(folder: Path, node_url: str) -> str:
    """Why nothing of the run in `folder` can be looked at, and where it might be."""
    if node_url:
        return (
            f"run {folder.name} has ended, and its streams are on the server at {node_url}, which `swarm up` did not start: "
            f"look there with --node-url {shlex.quote(node_url)}"
        )
    runs = folder.parent
    stored = sorted(runs.glob(f"*/{STORE}"), key=lambda each: each.stat().st_mtime, reverse=True)
    names = ", ".join(each.parent.name for each in stored[:5])
    if folder.is_dir():
        return (
            f"run {folder.name} has no server's store in {visible(str(folder.absolute()), 400)}, so nothing is left of its streams"
        )
    there = f"the newest are {names}" if names else "there are none with a server's store"
    return no_run_here(folder.name, runs.parent, there)
