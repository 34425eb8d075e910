"""Finds the scorer processes that this process has started."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def scorers_of_this_process() -> set[int]:
    """Process ids of the sandboxed scorers, and of the processes that fork them, that this process
    started.
    """
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    listed = children.read_text().split() if children.exists() else []
    found = set()
    for child in listed:
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"tasks.sandbox" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(int(child))
    return found
