"""Finds the runs that this user's processes are running, whichever folder they were started in, and
says where a run is that is not here.

The process that runs a run keeps its lock open, so the kernel's list of open files knows every
run's folder. Nothing is written down that could be out of date.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shared.config import NodeConfig
from shared.text import visible
from swarm_cli.errors import CommandError
from swarm_cli.running import LOCK, holder, only_running, read_note, running_runs

_PROCESSES = Path("/proc")
_SAID = 5
VAR_DIR_VARIABLE = "SWARM_NODE__VAR_DIR"
DEFAULT_VAR_DIR = Path("var")
SERVER_LOG = "nats.log"
"""In the folder of a run whose server `swarm up` started."""


def runs_of_this_user() -> list[Path]:
    """Folders of the runs that are running on this machine, sorted; empty where the kernel does
    not list open files as Linux does.
    """
    locks = {lock for process in _own_processes() for lock in _open_locks(process)}
    return sorted(lock.parent for lock in locks if holder(lock.parent) is not None)


def run_on_server(var_dir: Path, node_url: str) -> Path | None:
    """Folder of the run of this machine whose own server is at `node_url`; None if no run that is
    running has one there, or several say so.
    """
    running = {folder.absolute() for folder in (*running_runs(var_dir), *runs_of_this_user())}
    there = [folder for folder in running if (note := read_note(folder)) and note.node_url == node_url]
    return there[0] if len(there) == 1 and (there[0] / SERVER_LOG).is_file() else None


def running_elsewhere() -> list[str]:
    """A line for each of the runs (the first few), with what a command needs to look at it."""
    noted = [(folder, note) for folder in runs_of_this_user() if (note := read_note(folder))]
    return [
        f"Run {visible(folder.name, 80)} is running in {visible(str(folder.parent.parent), 200)}: --node-url {note.node_url}"
        for folder, note in noted[:_SAID]
    ]


def unnamed_server(var_dir: Path, node_url: str) -> str:
    """What is known of the server at the usual address if neither a run of this folder nor the user
    names one: whoever started it, its run is not this folder's.
    """
    found = run_on_server(var_dir, node_url)
    whose = (
        f"which run {visible(found.name, 80)} of {visible(str(found.parent.parent), 400)} has started"
        if found
        else "which may be another user's"
    )
    return f"no run is running in this folder; the server at {visible(node_url, 400)} answers, {whose}"


def is_named(config: NodeConfig, node_url: str, swarm_url: str = "") -> bool:
    """Whether the command line or the configuration names a server, or a run is running here.

    Raises:
        CommandError: several are.
    """
    named = node_url or swarm_url or config.nats.model_fields_set & {"node_url", "swarm_url"}
    return bool(named) or only_running(config) is not None


def refuse_unnamed_server(config: NodeConfig, node_url: str, swarm_url: str = "") -> None:
    """Refuse to change anything on a server that is not named (`is_named`). Raises CommandError."""
    if is_named(config, node_url, swarm_url):
        return
    raise CommandError(
        "no run is running in this folder, and neither the command nor the configuration names a server: add --node-url or "
        "--swarm-url, or --config" + "".join(f"\n{line}" for line in running_elsewhere())
    )


def no_run_here(run: str, var_dir: Path, what_is_there: str) -> str:
    """A message: there is no run of this name in `var_dir`, but what is, where this one is if that
    can be known, and how another folder is named.

    It is known of a folder in which something is running; nobody keeps a list of the others.
    """
    known = {folder.parent.parent for folder in runs_of_this_user()} - {var_dir.absolute()}
    found = sorted(each for each in known if run and (each / "runs" / run).is_dir())[:1]
    where = shlex.quote(visible(str(found[0]), 400)) if found else "FOLDER/var"
    place = "var/ of the current folder" if var_dir == Path("var") else "node.var_dir"
    remedy = f"It is in {where}: set" if found else f"Runs are looked for in {place}; for one that was started in FOLDER, set"
    here = visible(str((var_dir / "runs").absolute()), 400)
    return f"no run {run!r} in {here}: {what_is_there}\n{remedy} {VAR_DIR_VARIABLE}={where}"


def _own_processes() -> Iterator[Path]:
    for process in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.geteuid():
                yield process


def _open_locks(process: Path) -> Iterator[Path]:
    """Locks that the process has open under their present name, as this process sees it: one in a
    container may have another file of that name.
    """
    with suppress(OSError):  # it has ended, or may not be looked at
        for opened in (process / "fd").iterdir():
            with suppress(OSError):
                lock = Path(os.readlink(opened))
                if lock.name == LOCK and lock.parent.parent.name == "runs" and os.path.samestat(opened.stat(), lock.stat()):
                    yield lock
