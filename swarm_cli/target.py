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
from shared.transport.base import NotConnected
from swarm_cli.chosen_config import LOOPBACK
from swarm_cli.console import note as tell
from swarm_cli.errors import CommandError
from swarm_cli.runs import (
    NOTE,
    RunEnd,
    RunGone,
    newest_ended,
    no_run_here,
    only_running,
    read_end,
    read_note,
    run_at,
    running_runs,
    servers,
    unnamed_server,
)
from swarm_cli.server_diagnosis import naming_silent_server

_LISTENS_S = 2.0
LookRunOption = Annotated[
    str,
    typer.Option("--run", help="Run to look at, running or ended.  [default: the running one]", show_default=False),
]


@dataclass(frozen=True, slots=True)
class Target:
    """node_url, swarm_url: servers of the nodes' streams and of the swarm's (None: no swarm). run:
    the run they belong to, "" if it is not known. ended: how that run ended; its records are then
    looked at, and there is no server ("", None). named: the command line or the configuration names
    what is looked at. swarm_id: the run's swarm, "" if it is not known.
    """

    node_url: str
    swarm_url: str | None
    run: str = ""
    ended: RunEnd | None = None
    named: bool = False
    swarm_id: str = ""


def run_here(var_dir: Path, target: Target) -> str:
    """The running run of this machine that is looked at; empty if it has ended or is elsewhere."""
    return "" if target.ended is not None else target.run or run_at(var_dir, target.node_url)


def default_target(config: NodeConfig, node_url: str, swarm_url: str = "") -> Target:
    """What a command looks at if no run was named. Raises CommandError if several are running."""
    node, swarm = servers(config, node_url, swarm_url)
    found = only_running(config, node_url)
    named = bool(node_url) or "node_url" in config.nats.model_fields_set
    note = read_note(found) if found else None
    return Target(node, swarm, found.name if found else "", named=named, swarm_id=note.swarm_id if note else "")


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
    """What a command looks at, for the length of the block: the servers of the running run, or the
    records of the one that was named and has ended.

    only_here: refuse a named run that `swarm up` or `swarm join` did not start on this machine;
        else its records here are read beside the server that the configuration names.

    Raises:
        CommandError: there is no such run.
        ServerSilent: instead of a NotConnected of the block.
    """
    target = _chosen(config, run, node_url, swarm_url, only_here)
    with naming_silent_server(config.node.var_dir, target.node_url):
        yield target


def _chosen(config: NodeConfig, run: str, node_url: str, swarm_url: str, only_here: bool) -> Target:
    """As `looking_at`."""
    if not run or node_url:
        return default_target(config, node_url, swarm_url)
    folder = config.node.var_dir / "runs" / run
    note, end = read_note(folder), read_end(folder)
    if end is not None:
        return Target("", None, run, end, named=True)
    if note is not None and folder in running_runs(config.node.var_dir):
        swarm = swarm_url or note.swarm_url
        return Target(note.node_url, None if swarm == "none" else swarm, run, swarm_id=note.swarm_id)
    if not folder.is_dir():
        newest = sorted(folder.parent.glob(f"*/{NOTE}"), key=lambda each: each.stat().st_mtime, reverse=True)
        names = ", ".join(each.parent.name for each in newest[:5])
        raise CommandError(no_run_here(run, config.node.var_dir, f"the newest are {names}" if names else "there are none"))
    if only_here:
        raise CommandError(
            f"run {run} was not started by `swarm up` on this machine, so its server is not known here: name it with --node-url"
        )
    return replace(default_target(config, "", swarm_url), named=True)


class Following:
    """Chooses the run to look at, before each look. `target`: the current choice."""

    def __init__(self, config: NodeConfig, target: Target, *, fixed: bool) -> None:
        """fixed: the user named a server or a run, so other runs are mentioned but not
        switched to.
        """
        self._config = config
        self._fixed = fixed or "node_url" in config.nats.model_fields_set
        self.target = target

    def moved(self) -> bool:
        """Switch `target` to the only run running here; returns whether it changed. If several are
        running, `target` stays.
        """
        if self._fixed:
            return False
        try:
            found = default_target(self._config, "")
        except CommandError:
            return False
        if not found.run or found == self.target:
            return False
        self.target = found
        return True

    @property
    def follows(self) -> bool:
        """Whether it switches to the next run."""
        return not self._fixed

    @property
    def end(self) -> tuple[str, RunEnd] | None:
        """The current run and how it ended; None if it is running."""
        if self.target.ended is not None:
            return self.target.run, self.target.ended
        var_dir = self._config.node.var_dir
        if self.target.run:
            end = read_end(var_dir / "runs" / self.target.run)
            return (self.target.run, end) if end else None
        found = newest_ended(var_dir, self.target.node_url)
        return (found[0].name, found[1]) if found else None

    @property
    def before(self) -> tuple[str, RunEnd] | None:
        """Before any server has answered: the current run's end or, if no run is running here, that
        of the newest one, whatever its server was.
        """
        if self.end is not None or self._fixed or running_runs(self._config.node.var_dir):
            return self.end
        found = newest_ended(self._config.node.var_dir)
        return (found[0].name, found[1]) if found else None

    @property
    def instead(self) -> str:
        """A sentence about the runs that are running here, if `target` is not among them; else
        empty.
        """
        noted = [(folder.name, note) for folder in running_runs(self._config.node.var_dir) if (note := read_note(folder))]
        others = [(run, note.node_url) for run, note in noted if note.node_url != self.target.node_url]
        if not others or len(others) < len(noted):
            return ""
        return "; ".join(f"run {run} is running at {url} (--node-url {shlex.quote(url)})" for run, url in others[:3])
