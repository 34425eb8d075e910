"""Locks a run's folder, so that only one process on a machine at a time is a node's trainer in it.

An `flock(2)` lock lasts exactly as long as its process, even a stopped one. A process that gets the
lock therefore knows that the process whose lease names this file is dead, provided that it held the
lock on this machine since the last boot. A lock on a copied or moved disk, or over a network, says
nothing about a process elsewhere. In that case, and after a reboot, the newcomer waits for the
lease to run out.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

_POLL_S = 0.05
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FolderTaken(Exception):
    """Another process has the folder; the message says which, and what to do."""


class FolderLock:
    """A lock file, held until `close` or the end of the process.

    place: random number of this file, the same for every process that holds it between two boots of
        the machine.
    """

    def __init__(self, descriptor: int, place: str) -> None:
        self._descriptor, self.place = descriptor, place
        # A forked child would keep the lock after this process is dead.
        os.register_at_fork(after_in_child=self._close_in_child)

    @classmethod
    async def take(cls, file: Path, *, who: str, patience_s: float) -> FolderLock:
        """Lock `file`, created if missing. `who` describes the holder to a process that finds it
        locked.

        Raises:
            FolderTaken: a running process still has it after `patience_s`.
            OSError: the file cannot be created or locked.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            deadline = time.monotonic() + patience_s
            while not _locked(descriptor):
                if time.monotonic() >= deadline:
                    raise FolderTaken(_taken(file, who, _content(descriptor)))
                await asyncio.sleep(_POLL_S)
            return cls(descriptor, _place(descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _close_in_child(self) -> None:
        with suppress(OSError):
            self.close()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _content(descriptor: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(found, dict):
            return found
    return {}


def _place(descriptor: int) -> str:
    """The file's random number; the holder is written into the file. The number is kept only if the
    previous holder wrote it on this device since this boot. Otherwise the file may be a copy, even
    one on a copied disk with the same inode numbers, and having the lock does not prove that the
    previous holder is dead.
    """
    file, found = os.fstat(descriptor), _content(descriptor)
    here = {"boot": _boot_id(), "device": file.st_dev, "inode": file.st_ino}
    known = found.get("place") if here["boot"] and here == {key: found.get(key) for key in here} else None
    place = known if isinstance(known, str) and len(known) == 32 else uuid.uuid4().hex
    holder = {"place": place, **here, "pid": os.getpid(), "host": socket.gethostname()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    return place


def _boot_id() -> str:
    """The kernel's random number for this boot, empty if there is none. Containers on a machine
    share it, as they share its locks.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _taken(file: Path, who: str, found: dict[str, Any]) -> str:
    return (
        f"another {who} uses {file.parent}: process {found.get('pid', 'unknown')} on {found.get('host', 'unknown')} holds "
        f"{file.name}. End that process (it may be suspended), or give this one another node.run, node.id or node.var_dir"
    )
