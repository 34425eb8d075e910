"""Reads, hashes and writes weight files in constant memory. These functions block: call them in a
thread.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shared import atomic_files
from shared.atomic_files import new_draft, write_all

BLOCK_BYTES = 1 << 20
"""Large enough that system calls take a negligible part of the time, small enough to be hashed
while it is still in the processor's cache.
"""

_DOWNLOADS_KEPT = 2
_DOWNLOAD = re.compile(r"[0-9a-f]{64}\.safetensors")


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb", buffering=0) as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def copy_hashing(source: Path, write: Callable[[memoryview], int | None]) -> tuple[str, int]:
    """Pass the file's bytes to `write` block by block. Returns their sha256 and number.

    A block is hashed in a second thread while it is written and the next one is read; hashing and
    writing take about equally long.
    """
    digest, size = hashlib.sha256(), 0
    blocks = itertools.cycle([memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))])
    with source.open("rb", buffering=0) as stream, ThreadPoolExecutor(1) as hasher:
        before: Future[None] | None = None
        for block in blocks:
            if not (count := stream.readinto(block)):
                break
            hashing = hasher.submit(digest.update, block[:count])
            write_all(block[:count], write)
            size += count
            if before is not None:
                # The next block is read into this one's buffer.
                before.result()
            before = hashing
    return digest.hexdigest(), size


def sync_hashing(file: Path) -> tuple[str, int]:
    """Write a file's bytes to the disk and hash them at the same time. Returns their sha256 and
    number.
    """
    with file.open("rb", buffering=0) as source, ThreadPoolExecutor(1) as syncer:
        syncing = syncer.submit(atomic_files.sync, source.fileno())
        digest = hashlib.file_digest(source, "sha256").hexdigest()
        syncing.result()
        return digest, os.fstat(source.fileno()).st_size


def same_volume(file: Path, folder: Path) -> bool:
    """Check whether `file` can be moved into `folder` without copying it.

    Two mounts of one disk have one device number, and still no file can be moved between them. Only
    trying once shows it.
    """
    return file.stat().st_dev == folder.stat().st_dev and _moves_between(file.parent.resolve(), folder.resolve())


@functools.cache
def _moves_between(source: Path, target: Path) -> bool:
    probe = new_draft(source)
    moved = target / probe.name
    try:
        probe.touch()
        os.replace(probe, moved)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    finally:
        probe.unlink(missing_ok=True)
        moved.unlink(missing_ok=True)
    return True


def remove_old_downloads(folder: Path, newest: Path) -> None:
    """Delete old downloads except the newest, because an engine may still be reading the previous
    one.
    """
    downloads = [file for file in folder.iterdir() if _DOWNLOAD.fullmatch(file.name) and file != newest]
    downloads.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in downloads[_DOWNLOADS_KEPT - 1 :]:
        file.unlink(missing_ok=True)


def cause_of(error: OSError, folder: Path) -> str:
    """Cause and remedy of a failed write, as text."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {folder}: free some, or move policy_store.uri"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{folder} may not be written ({error.strerror}): change its owner or move policy_store.uri"
    return f"{error}: check {folder}"
