"""Which run and which server a command means: those that the command line or the configuration
names, else those of the only run that is running in this folder, else the folder's last run.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import typer

from shared.config.verifier_section import ViewConfig
from shared.runtime.planes import connect_node_plane
from shared.text import visible
from shared.transport.base import NotConnected, Transport
from swarm_cli.chosen_config import LOOPBACK
from swarm_cli.console import note as tell
from swarm_cli.errors import CommandError
from swarm_cli.runs import (
    DEFAULT_VAR_DIR,
    VAR_DIR_VARIABLE,
    RunEnd,
    RunGone,
    RunNote,
    afterwards,
    newest_ended,
    read_end,
    read_note,
    run_of_procfile,
    run_on_server,
    running_runs,
    runs_of_this_user,
)
from swarm_cli.server_diagnosis import ServerSilent, naming_silent_server, silent_server

T = TypeVar("T")
_LISTENS_S, _CONNECT_S = 2.0, 5.0
_RUNS_NAMED = 5
LookRunOption = Annotated[
    str,
    typer.Option("--run", help="Run to look at, running or ended.  [default: the running one, else the last]", show_default=False),
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


def default_target(config: ViewConfig, node_url: str, swarm_url: str = "") -> Target:
    """The target of a command that names no run: the servers of the command line, else those of the
    configuration, else those of the only run on this machine, else the usual ones.

    Raises:
        CommandError: several runs are running and none was chosen.
    """
    named = bool(node_url) or "node_url" in config.nats.model_fields_set
    found = None if named else only_run(config.node.var_dir, lambda note: f"--node-url {shlex.quote(note.node_url)}")
    folder, note = found or (None, None)
    node = node_url or (note.node_url if note else config.nats.node_url)
    swarm = swarm_url or node_url or (note.swarm_url if note else config.nats.swarm_url) or "none"
    known = (folder.name, note.swarm_id) if folder and note else ("", "")
    return Target(node, None if swarm == "none" else swarm, known[0], named=named, swarm_id=known[1])


def only_run(var_dir: Path, choice: Callable[[RunNote], str]) -> tuple[Path, RunNote] | None:
    """The only running run's folder and note; None: none is running. choice: the option that
    chooses a run, for the message.

    Raises:
        CommandError: several are.
    """
    noted = [(folder, note) for folder in running_runs(var_dir) if (note := read_note(folder))]
    if len(noted) > 1:
        lines = [f"  {choice(note)}   run {folder.name}" for folder, note in noted]
        raise CommandError("several runs are running here: choose one with\n" + "\n".join(lines))
    return noted[0] if noted else None


def run_at(var_dir: Path, node_url: str) -> str:
    """The run running on this machine whose nodes' streams are on this server; empty if there is
    none, or several.
    """
    names = [folder.name for folder in running_runs(var_dir) if (note := read_note(folder)) and note.node_url == node_url]
    return names[0] if len(names) == 1 else ""


def run_here(var_dir: Path, target: Target) -> str:
    """The running run of this machine that is looked at; empty if it has ended or is elsewhere."""
    return "" if target.ended is not None else target.run or run_at(var_dir, target.node_url)


def running_elsewhere() -> list[str]:
    """A line for each of the runs (the first few), with what a command needs to look at it."""
    noted = [(folder, note) for folder in runs_of_this_user() if (note := read_note(folder))]
    return [
        f"Run {visible(folder.name, 80)} is running in {visible(str(folder.parent.parent), 200)}: --node-url {note.node_url}"
        for folder, note in noted[:_RUNS_NAMED]
    ]


def is_named(config: ViewConfig, target: Target, swarm_url: str = "") -> bool:
    """Check whether a server is named, on the command line or in the configuration, or a run is
    running here.
    """
    return target.named or bool(target.run or swarm_url) or "swarm_url" in config.nats.model_fields_set


def refuse_unnamed_server(config: ViewConfig, node_url: str, swarm_url: str = "") -> None:
    """Refuse to change anything on a server that is not named (`is_named`). Raises CommandError."""
    if is_named(config, default_target(config, node_url, swarm_url), swarm_url):
        return
    raise CommandError(
        "no run is running in this folder, and neither the command nor the configuration names a server: add --node-url or "
        "--swarm-url, or --config" + "".join(f"\n{line}" for line in running_elsewhere())
    )


def unnamed_server(var_dir: Path, node_url: str) -> str:
    """Describe the server at the usual address if neither a run of this folder nor the user names
    one: whoever started it, its run is not this folder's.
    """
    found = run_on_server(var_dir, node_url)
    whose = (
        f"which run {visible(found.name, 80)} of {visible(str(found.parent.parent), 400)} has started"
        if found
        else "which may be another user's"
    )
    return f"no run is running in this folder; the server at {visible(node_url, 400)} answers, {whose}"


def find_run(run: str, var_dir: Path) -> Path:
    """Folder of a run, given by name or by path.

    Raises:
        CommandError: there is no such run; the message names the newest runs.
    """
    for folder in (var_dir / "runs" / run, Path(run)):
        if folder.is_dir():
            return folder
    raise no_run_here(run, var_dir)


def no_run_here(run: str, var_dir: Path) -> CommandError:
    """The error that there is no run of this name in `var_dir`, with the newest that are there,
    where this one is if that can be known (something is running in that folder), and how another
    folder is named.
    """
    runs = var_dir / "runs"
    newest = sorted((each for each in runs.glob("*") if each.is_dir()), key=lambda each: -each.stat().st_mtime)[:_RUNS_NAMED]
    there = f"the newest are {', '.join(each.name for each in newest)}" if newest else "there are none; `swarm up` makes one"
    known = {folder.parent.parent for folder in runs_of_this_user()} - {var_dir.absolute()}
    found = sorted(each for each in known if run and (each / "runs" / run).is_dir())[:1]
    where = shlex.quote(visible(str(found[0]), 400)) if found else "FOLDER/var"
    place = "var/ of the current folder" if var_dir == Path("var") else "node.var_dir"
    remedy = f"It is in {where}: set" if found else f"Runs are looked for in {place}; for one that was started in FOLDER, set"
    here = visible(str(runs.absolute()), 400)
    return CommandError(f"no run {run!r} in {here}: {there}\n{remedy} {VAR_DIR_VARIABLE}={where}")


def running_run(run: str, var_dir: Path | None) -> Path:
    """Folder of the named run, or of the only running one.

    var_dir: the folder that holds `runs/`; None: the usual one here. A run that is named but not
    there is then looked for among all that this user's processes are running.

    Raises:
        CommandError: the named run is not running, or no name was given and none or several are.
    """
    runs = (var_dir or DEFAULT_VAR_DIR) / "runs"
    running = running_runs(var_dir or DEFAULT_VAR_DIR)
    if run and runs / run in running:
        return runs / run
    if not run and len(running) == 1:
        return running[0]
    if not run and running:
        raise CommandError(f"several runs are running: name one of {', '.join(folder.name for folder in running)}")
    elsewhere = runs_of_this_user()
    meant = [folder for folder in elsewhere if folder.name == run]
    if len(meant) == 1 and var_dir is None:
        return meant[0]
    what = f"run {run!r}" if run else "no `swarm up`"
    raise CommandError(f"{what} is{' not' if run else ''} running in {runs}: {_instead(meant or elsewhere)}")


def _instead(elsewhere: Sequence[Path]) -> str:
    if not elsewhere:
        return "nothing of yours is running on this machine (end a `honcho start` with Ctrl-C)"
    lines = [
        f"  run {visible(folder.name, 80)}   --var-dir {shlex.quote(visible(str(folder.parent.parent), 400))}"
        for folder in elsewhere
    ]
    return "\n".join(["choose one that is running on this machine", *lines])


def where_runs_are(config: ViewConfig) -> str:
    """The option, with a leading space, that commands need to find a run by its name; empty if they
    look in the right folder anyway.
    """
    found_unasked = VAR_DIR_VARIABLE in os.environ or config.node.var_dir == DEFAULT_VAR_DIR
    return "" if found_unasked else f" --var-dir {shlex.quote(str(config.node.var_dir))}"


def ended_here(var_dir: Path, target: Target) -> tuple[Path, RunEnd] | None:
    """The ended run that explains why the target's server does not answer, or none of its nodes is
    alive, and its end: the target's run or, if that is not known, the newest one of that server.
    """
    if target.run:
        folder = var_dir / "runs" / target.run
        end = target.ended or read_end(folder)
        return None if end is None else (folder, end)
    return newest_ended(var_dir, target.node_url)


def explained(var_dir: Path, target: Target, error: NotConnected) -> NotConnected:
    """The error that says why the target's server does not answer: ServerSilent or RunGone if its
    run on this machine explains it, else `error`. Waits for the server as `silent_server` does.
    """
    if told := silent_server(var_dir, target.node_url):
        return ServerSilent(told)
    ended = ended_here(var_dir, target)
    return error if ended is None else RunGone(*ended)


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
        # If nobody named a server, the run may have had another.
        if found := newest_ended(var_dir, target.node_url if target.named else ""):
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
def looking_at(config: ViewConfig, run: str, node_url: str, swarm_url: str = "", *, only_here: bool = True) -> Iterator[Target]:
    """The target of a command, for the length of the block: the servers of the running run, or the
    records of the one that was named and has ended. If neither a run nor a server is named and none
    is running here, the records of the run that ended last.

    only_here: refuse a named run that `swarm up` or `swarm join` did not start on this machine;
    else its records here are read beside the server that the configuration names.

    Raises:
        CommandError: there is no such run.
        ServerSilent: instead of a NotConnected of the block.
    """
    target = _chosen(config, run, node_url, swarm_url, only_here)
    with naming_silent_server(config.node.var_dir, target.node_url):
        yield target


def _chosen(config: ViewConfig, run: str, node_url: str, swarm_url: str, only_here: bool) -> Target:
    """As `looking_at`."""
    if not run or node_url:
        unnamed = not (node_url or swarm_url or "node_url" in config.nats.model_fields_set)
        return (_last(config.node.var_dir) if unnamed else None) or default_target(config, node_url, swarm_url)
    folder = config.node.var_dir / "runs" / run
    note, end = read_note(folder), read_end(folder)
    if end is not None:
        return Target("", None, run, end, named=True)
    if note is not None and folder in running_runs(config.node.var_dir):
        swarm = swarm_url or note.swarm_url
        return Target(note.node_url, None if swarm == "none" else swarm, run, swarm_id=note.swarm_id)
    if not folder.is_dir():
        raise no_run_here(run, config.node.var_dir)
    if only_here:
        raise CommandError(
            f"run {run} was not started by `swarm up` on this machine, so its server is not known here: name it with --node-url"
        )
    return replace(default_target(config, "", swarm_url), named=True)


def _last(var_dir: Path) -> Target | None:
    """The run that ended last, with a note that no server was asked; None: one is running here, or
    none has ended.
    """
    if running_runs(var_dir) or run_of_procfile(var_dir):
        return None
    found = newest_ended(var_dir)
    if found is None:
        return None
    folder, end = found
    tell(f"no run is running in this folder: this is its last. {afterwards(folder, '')}; --node-url shows a server")
    return Target("", None, folder.name, end)


def on_node_plane(config: ViewConfig, target: Target, process: str, work: Callable[[Transport], Awaitable[T]], *, acts: bool) -> T:
    """Run `work` on a connection to the target's node plane, as this process or operator. acts: as
    for `check_listening`.

    Raises:
        NotConnected, AccessDenied: the server does not answer in time, or does not admit this user.
        CommandError: as `check_listening` does.
    """

    async def run() -> T:
        plane = await connect_node_plane(config, process, timeout_s=_CONNECT_S, url=target.node_url)
        try:
            return await work(plane)
        finally:
            await plane.close()

    with naming_silent_server(config.node.var_dir, target.node_url):
        check_listening(config.node.var_dir, target, acts=acts)
        return asyncio.run(run())
