"""`swarm nats reload`: makes a NATS server read its files again whenever they have changed.

It runs in a container beside the server, in the same process namespace. Kubernetes updates a Secret
in the pod by itself, but the server reads it only when it gets a signal.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import structlog

from shared.plain_files import read_named

log = structlog.get_logger(__name__)

SIGNALS = 2
"""nats-server 2.15.1 gives a new account its imports only at the second reload."""
BETWEEN_S = 5.0
_MOST_PROCESSES = 2**22
"""The highest process id that Linux gives."""
_PID_BYTES = 100


class Reloads:
    """Decides when to signal a server, from the contents of its files and the time."""

    def __init__(self, known: str | None) -> None:
        """`known`: digest of the files that the server has read; None if they have
        changed since.
        """
        self._known = known
        self._left = 0
        self._next_at = 0.0

    def due(self, found: str, now: float) -> bool:
        """Whether to signal the server now. `found`: digest of its files; `now` in seconds."""
        if found != self._known:
            self._known, self._left, self._next_at = found, SIGNALS, now
        return self._left > 0 and now >= self._next_at

    def told(self, now: float) -> None:
        """Record that the server was signalled."""
        self._left -= 1
        self._next_at = now + BETWEEN_S


def digest(folders: Iterable[Path]) -> str:
    """Digest of the names and contents of all files in the folders, except hidden ones: Kubernetes
    keeps the versions of a Secret in hidden folders and links to the newest.

    Raises:
        OSError: a file cannot be read, for example while Kubernetes is exchanging them.
    """
    found = hashlib.sha256()
    for path in _files(folders):
        content = path.read_bytes()
        found.update(f"{path}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def newest_s(folders: Iterable[Path]) -> float:
    """When the newest of these files was written, in seconds since 1970; 0 without files."""
    return max((path.stat().st_mtime for path in _files(folders)), default=0.0)


def _files(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())


def server_process(text: str) -> int:
    """The process id in a pid file.

    Raises:
        ValueError: it cannot be a server's id. 0 and negative numbers stand for groups of
        processes,
            and 1 for the pod's or the machine's init process: a signal would hit other processes.
    """
    number = int(text)
    if not 1 < number <= _MOST_PROCESSES:
        raise ValueError(f"the pid file says {number}, which cannot be a server's id: let the server write it (pid_file)")
    return number


def keep_reloading(folders: list[Path], pid_file: Path, every_s: float, stopping: threading.Event) -> None:
    """Check every `every_s` seconds until `stopping` is set. A failure is logged when it first
    occurs or changes, and tried again: if this container ended, Kubernetes would take the server
    beside it out of its Service.
    """
    reloads: Reloads | None = None
    said = ""
    clock_s = 0.0
    while not stopping.wait(every_s if reloads is not None else min(every_s, 1.0)):
        clock_s += every_s
        try:
            found = digest(folders)
            if reloads is None:
                # The server may not have read files that were written after it started.
                reloads = Reloads(None if newest_s(folders) > pid_file.stat().st_mtime else found)
                log.info("nats_reload_watching", folders=[str(folder) for folder in folders])
            if reloads.due(found, clock_s):
                os.kill(server_process(read_named(pid_file, _PID_BYTES).decode()), signal.SIGHUP)
                reloads.told(clock_s)
                log.info("nats_reloaded", files=found[:12], consequence="the server's own log says whether it took them")
            said = ""
        except (OSError, ValueError) as error:
            if said != (said := str(error)):
                log.warning("nats_reload_delayed", reason=said, consequence="tried again")
