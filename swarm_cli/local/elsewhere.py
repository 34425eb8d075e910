"""Finds the runs that this user's processes are running, whichever folder they were started in.

The process that runs a run keeps its lock open, so the kernel's list of open files knows every
run's folder. Nothing is written down that could be out of date.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shared.text import visible
from swarm_cli.running import LOCK, holder, read_note

_PROCESSES = Path("/proc")
_SAID = 5


def runs_of_this_user() -> list[Path]:
    """Folders of the runs that are running on this machine, sorted; empty where the kernel does
    not list open files as Linux does.
    """
    locks = {lock for process in _own_processes() for lock in _open_locks(process)}
    return sorted(lock.parent for lock in locks if holder(lock.parent) is not None)


def running_elsewhere() -> list[str]:
    """A line for each of the runs (the first few), with what a command needs to look at it."""
    noted = [(folder, note) for folder in runs_of_this_user() if (note := read_note(folder))]
    return [
        f"Run {visible(folder.name, 80)} is running in {visible(str(folder.parent.parent), 200)}: --node-url {note.node_url}"
        for folder, note in noted[:_SAID]
    ]


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
