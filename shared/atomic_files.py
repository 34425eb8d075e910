"""Files that appear complete: they are written under another name beside their place, a draft, and
renamed. Syncs are counted, so that a slow disk can be told from everything else that makes a
process slow. These functions block.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

DRAFT_PREFIX = ".draft-"
"""Prefix of files that are being written; also of files that a killed writer leaves behind."""

_ABANDONED_AFTER_S = 3600.0


def new_draft(folder: Path) -> Path:
    """A name in `folder` that no other writer has."""
    return folder / f"{DRAFT_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"


@contextmanager
def draft_in(folder: Path, mode: int = 0o666) -> Iterator[tuple[BinaryIO, Path]]:
    """An open new file in `folder`, which is deleted afterwards unless it was renamed. `folder` is
    created if it does not exist. `mode`: who may read and write the file, less the umask.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = new_draft(folder)
    try:
        with open(draft, "xb", buffering=0, opener=lambda path, flags: os.open(path, flags, mode)) as stream:
            yield stream, draft
    finally:
        draft.unlink(missing_ok=True)


def write_all(block: memoryview, write: Callable[[memoryview], int | None]) -> None:
    """Write all of `block`. A nearly full disk accepts a part of it without an error; the error
    comes with the rest.
    """
    while block:
        if (taken := write(block)) is None:
            raise BlockingIOError("the file takes nothing now")
        block = block[taken:]


def keep_draft(stream: BinaryIO, draft: Path, target: Path, *, synced: bool = True) -> None:
    """Close a draft and give it its name, by default after its bytes have reached the disk, so that
    no name ever refers to half a file. Without that a power cut may leave an empty file.

    The folder is not synced: a power cut may lose the name.
    """
    if synced:
        sync(stream.fileno())
    stream.close()  # some file systems say only now that the disk is full
    os.replace(draft, target)


def replace_text(file: Path, text: str, *, mode: int = 0o666, synced: bool = False) -> None:
    """Create or replace a text file in one step, so that no reader sees half of it.

    Unless it is `synced`, a power cut may leave an empty file: good for what is written again, or
    can be done without.

    Raises:
        OSError: it cannot be written; an existing file is unchanged.
    """
    with draft_in(file.parent, mode) as (stream, draft):
        write_all(memoryview(text.encode()), stream.write)
        keep_draft(stream, draft, file, synced=synced)


def create_once(file: Path, content: bytes, *, mode: int = 0o666) -> bool:
    """Create a file, synced but for its name in the folder, unless it exists. Whether it is new: of
    several processes that do this at once, one gets True.

    Raises:
        OSError: it cannot be written.
    """
    with draft_in(file.parent, mode) as (stream, draft):
        write_all(memoryview(content), stream.write)
        sync(stream.fileno())
        try:
            os.link(draft, file)  # which refuses to replace a file
        except FileExistsError:
            return False
        return True


def remove_abandoned_drafts(folder: Path) -> None:
    """Delete what killed writers left in `folder`. A draft that is younger than an hour may still
    be in use and stays.
    """
    for draft in folder.glob(f"{DRAFT_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > _ABANDONED_AFTER_S:
                draft.unlink(missing_ok=True)


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
