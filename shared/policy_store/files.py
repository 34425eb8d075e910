"""Reads, hashes and writes weight files in constant memory. These functions block: call them in a
thread.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
"""Large enough that system calls take a negligible part of the time, small enough to be hashed
while it is still in the processor's cache.
"""

DRAFT_PREFIX = ".draft-"
"""Prefix of files that are being written; also of files that a killed writer leaves behind."""

_ABANDONED_AFTER_S = 3600.0
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
            _write_all(block[:count], write)
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
        syncing = syncer.submit(os.fsync, source.fileno())
        digest = hashlib.file_digest(source, "sha256").hexdigest()
        syncing.result()
        return digest, os.fstat(source.fileno()).st_size


def same_volume(file: Path, folder: Path) -> bool:
    """Whether `file` can be moved into `folder` without copying it.

    Two mounts of one disk have one device number, and still no file can be moved between them. Only
    trying once shows it.
    """
    return file.stat().st_dev == folder.stat().st_dev and _moves_between(file.parent.resolve(), folder.resolve())


@functools.cache
def _moves_between(source: Path, target: Path) -> bool:
    name = f"{DRAFT_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    probe, moved = source / name, target / name
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


def _write_all(block: memoryview, write: Callable[[memoryview], int | None]) -> None:
    # A nearly full disk accepts a part of a block without an error; the error comes with the rest.
    while block:
        block = block[write(block) or 0 :]


@contextmanager
def draft_in(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """An open new file in `folder`, which is deleted afterwards unless it was renamed with
    `keep_draft`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{DRAFT_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with draft.open("xb", buffering=0) as stream:
            yield stream, draft
    finally:
        draft.unlink(missing_ok=True)


def keep_draft(stream: BinaryIO, draft: Path, target: Path) -> None:
    """Rename a draft after its bytes have reached the disk, so that no name ever refers to half a
    file.

    The folder is not synced. If a power cut loses the name, its readers miss the file, and it is
    published again on resume.
    """
    os.fsync(stream.fileno())
    os.replace(draft, target)


def remove_abandoned_drafts(folder: Path) -> None:
    """Delete what killed writers left in `folder`. A draft that is younger than an hour may still
    be in use and stays.
    """
    for draft in folder.glob(f"{DRAFT_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > _ABANDONED_AFTER_S:
                draft.unlink(missing_ok=True)


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
        return f"no space left for {folder}: free some, lower policy_store.keep or move policy_store.uri"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{folder} may not be written ({error.strerror}): change its owner or move policy_store.uri"
    return f"{error}: check {folder}"
