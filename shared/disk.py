"""Syncs files and keeps count of how long that takes in this process, so that a slow disk can be
told from everything else that makes a process slow. These functions block.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Waits:
    """Count and total seconds of waits. For several threads."""

    count: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, seconds: float) -> None:
        """Count one wait."""
        with self._lock:
            self.count += 1
            self.seconds += seconds


SYNCS = Waits()
"""All syncs of this process."""


def sync(descriptor: int) -> None:
    """Wait until a file's bytes have reached the disk. Raises OSError if they cannot."""
    started = time.perf_counter()
    try:
        os.fsync(descriptor)
    finally:
        SYNCS.add(time.perf_counter() - started)


def sync_path(path: Path) -> None:
    """The same for a closed file, or for the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
