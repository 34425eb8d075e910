"""`swarm nats reload`: tells a NATS server to read its files again whenever they have changed.

For a container beside the server, in one process namespace with it: a Secret that is written anew
appears in the pod by itself, and a server reads it only when it is told.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

SIGNALS = 2
"""nats-server 2.15.1 gives a new account its imports at the second reload only."""
BETWEEN_S = 5.0
_MOST_PROCESSES = 2**22
"""Linux gives no process a higher number."""


class Reloads:
    """Decides when a server is told, from what its files hold and what time it is."""

    def __init__(self, known: str | None) -> None:
        """`known`: what the server has read; None if that is no longer there."""
        self._known = known
        self._left = 0
        self._next_at = 0.0

    def due(self, found: str, now: float) -> bool:
        """Whether to tell the server now. `found`: digest of its files; `now` in seconds."""
        if found != self._known:
            self._known, self._left, self._next_at = found, SIGNALS, now
        return self._left > 0 and now >= self._next_at

    def told(self, now: float) -> None:
        """The server has been told."""
        self._left -= 1
        self._next_at = now + BETWEEN_S


def digest(folders: Iterable[Path]) -> str:
    """Of names and contents of all files below the folders, hidden ones left out: Kubernetes keeps
    the versions of a Secret in folders of such names, and links to the newest.

    Raises:
        OSError: one cannot be read, as in the instant in which Kubernetes exchanges them.
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
    """The process number in a pid file.

    Raises:
        ValueError: it is no number of a server. 0 and negative ones stand for groups of processes
            and 1 for what holds the pod or the machine: a signal would end others.
    """
    number = int(text)
    if not 1 < number <= _MOST_PROCESSES:
        raise ValueError(f"the pid file says {number}, which is no server's process: let the server write it (pid_file)")
    return number


def keep_reloading(folders: list[Path], pid_file: Path, every_s: float, stopping: threading.Event) -> None:
    """Look every `every_s` seconds until `stopping` is set. Whatever cannot be read or reached is
    logged once a change and tried again: a container that ends would take the server beside it out
    of its Service.
    """
    reloads: Reloads | None = None
    said = ""
    clock_s = 0.0
    while not stopping.wait(every_s if reloads is not None else min(every_s, 1.0)):
        clock_s += every_s
        try:
            found = digest(folders)
            if reloads is None:
                # What was written after the server had started, it may not have read.
                reloads = Reloads(None if newest_s(folders) > pid_file.stat().st_mtime else found)
                log.info("nats_reload_watching", folders=[str(folder) for folder in folders])
            if reloads.due(found, clock_s):
                os.kill(server_process(pid_file.read_text()), signal.SIGHUP)
                reloads.told(clock_s)
                log.info("nats_reloaded", files=found[:12], consequence="the server's own log says whether it took them")
            said = ""
        except (OSError, ValueError) as error:
            if said != (said := str(error)):
                log.warning("nats_reload_delayed", reason=said, consequence="tried again")
