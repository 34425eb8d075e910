"""Which runs are running on this machine, and which servers a command uses if it was given none.

A running `swarm up` or `swarm join` holds `up.lock` in its run's folder and leaves a note beside it
(`swarm_cli.local` writes both).
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import msgspec

from shared.config import NodeConfig
from shared.plain_files import open_plain, read_plain
from shared.text import visible
from swarm_cli.errors import CommandError
from swarm_cli.own_run import NOTE, is_own
from swarm_cli.up_options import continues, stays_here

LOCK = "up.lock"
_NOTE_BYTES = 65_536
JOINED = "the same `swarm join`"
"""A note's `goes_on` for a run of `swarm join`, whose token it does not keep."""


class RunNote(msgspec.Struct, frozen=True):
    """node_url, swarm_url: servers of the nodes' streams and of the swarm's; swarm_url "none": no
    swarm. goes_on: the command that continues the run. swarm_id: the swarm that its nodes are in;
    empty if an earlier version wrote the note. started_in: the folder from which relative paths of
    the configuration count; empty likewise.
    """

    node_url: str
    swarm_url: str
    goes_on: str
    swarm_id: str = ""
    started_in: str = ""


def running_runs(var_dir: Path) -> list[Path]:
    """Folders of the runs that are running on this machine, sorted by name."""
    return sorted(file.parent for file in (var_dir / "runs").glob(f"*/{LOCK}") if holder(file.parent) is not None)


def holder(folder: Path) -> int | None:
    """The id of the process that runs the run in `folder`: 0 if it is not known, None if there is
    no such process. Only a file of this user's, or of root's, with one name is a run's lock: in a
    folder that somebody else made it could be a link to a lock of any process.
    """
    try:
        with open(open_plain(folder / LOCK)) as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (os.geteuid(), 0) or found.st_nlink > 1:
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return pid_in(file)
    except OSError:
        pass
    return None


def running_since(folder: Path) -> float | None:
    """The Unix time at which the process that runs the run in `folder` began; None if there is no
    such process.
    """
    try:
        return (folder / LOCK).stat().st_mtime if holder(folder) is not None else None
    except OSError:  # it has ended meanwhile
        return None


def read_note(folder: Path) -> RunNote | None:
    """The run's note; None if there is none or another version wrote it, or if its addresses are
    none: they are printed in commands, and the note may be somebody else's.
    """
    try:
        note = msgspec.json.decode(read_plain(folder / NOTE, _NOTE_BYTES), type=RunNote)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    written = (note.node_url, note.swarm_url, note.swarm_id)
    return None if any(" " in text or visible(text) != text for text in written) else note


def goes_on(folder: Path) -> str:
    """The command that continues the run in `folder`, as far as it is known, wherever this process
    is.
    """
    left = read_note(folder)
    if left and left.goes_on == JOINED:
        return JOINED
    if left and continues(left.goes_on, folder) and (is_own(folder) or stays_here(left.goes_on)):
        return (_to(left.started_in) if is_own(folder) else "") + left.goes_on
    return f"swarm up --run {folder.name}, with the options that it was started with"


def _to(started_in: str) -> str:
    """What takes a shell to this folder from the current one."""
    elsewhere = started_in and visible(started_in) == started_in and Path(started_in) != Path.cwd()
    return f"cd {shlex.quote(started_in)} && " if elsewhere else ""


def servers(config: NodeConfig, node_url: str, swarm_url: str = "") -> tuple[str, str | None]:
    """The servers that a command uses: the nodes' and the swarm's (None: no swarm).

    They are the ones given on the command line (`node_url`, `swarm_url`), else those that the
    configuration names, else those of the only run on this machine, else the default.

    Raises:
        CommandError: several runs are running and none was chosen.
    """
    folder = only_running(config, node_url)
    found = read_note(folder) if folder else None
    node = node_url or (found.node_url if found else config.nats.node_url)
    swarm = swarm_url or node_url or (found.swarm_url if found else config.nats.swarm_url) or "none"
    return node, None if swarm == "none" else swarm


def only_running(config: NodeConfig, node_url: str = "") -> Path | None:
    """Folder of the only run on this machine; None if none is running, or if the command line
    (`node_url`) or the configuration names a server.

    Raises:
        CommandError: several runs are running and none was chosen.
    """
    if node_url or "node_url" in config.nats.model_fields_set:
        return None
    found = _only_run(config.node.var_dir, lambda note: f"--node-url {shlex.quote(note.node_url)}")
    return found[0] if found else None


def run_at(var_dir: Path, node_url: str) -> str:
    """The run running on this machine whose nodes' streams are on this server; empty if there is
    none, or several.
    """
    names = [folder.name for folder in running_runs(var_dir) if (note := read_note(folder)) and note.node_url == node_url]
    return names[0] if len(names) == 1 else ""


def running_swarm(var_dir: Path, command: str = "swarm observe") -> RunNote | None:
    """The note of the only running run, with its swarm's server; None: none is running.

    command: what takes the server's address, for the message.

    Raises:
        CommandError: several are.
    """
    found = _only_run(var_dir, lambda note: f"{command} {shlex.quote(note.swarm_url)}")
    return found[1] if found else None


def _only_run(var_dir: Path, named: Callable[[RunNote], str]) -> tuple[Path, RunNote] | None:
    noted = [(folder, note) for folder in running_runs(var_dir) if (note := read_note(folder))]
    if len(noted) > 1:
        lines = [f"  {named(note)}   run {folder.name}" for folder, note in noted]
        raise CommandError("several runs are running here: choose one with\n" + "\n".join(lines))
    return noted[0] if noted else None


def pid_in(file: TextIO) -> int:
    """The id of the process that wrote its number into the lock, if it still has the lock open;
    else 0. The number alone is no proof: another process may have it by now.
    """
    file.seek(0)
    text = file.read(20).strip()
    if not (text.isascii() and text.isdigit()):
        return 0
    lock = os.fstat(file.fileno())
    with suppress(OSError):  # no such process, or another user's
        for opened in Path(f"/proc/{text}/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(opened.stat(), lock):
                    return int(text)
    return 0
