"""Folders that are written completely or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared import disk
from shared.unwinding import stop_if_asked


def refuse_filled(folder: Path, purpose: str) -> None:
    """Check, before any work is done, that `appearing_whole` can create `folder`; `purpose` says
    what the folder is for.

    Raises:
        FileExistsError: `folder` exists and is not an empty folder, is a link or the current
            folder, or one of its parents is a file.
        OSError: the name is invalid, or the folder cannot be inspected.
    """
    if "\0" in str(folder):
        raise OSError(errno.EINVAL, "no name may hold the character NUL", str(folder))
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link, which is not replaced: choose another folder for {purpose}")
    on_the_way = next((parent for parent in folder.absolute().parents if parent.exists()), folder)
    if not on_the_way.is_dir():
        raise FileExistsError(f"{on_the_way} is a file, so {folder} cannot be created: choose another folder for {purpose}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty: choose another folder for {purpose}")
    if folder.exists() and folder.samefile(Path()):
        raise FileExistsError(f"{folder} is the current folder, which is not replaced: choose another folder for {purpose}")
    if folder.name == "..":
        raise FileExistsError(f"{folder} has no name that it could be renamed to: choose another folder for {purpose}")


@contextmanager
def appearing_whole(folder: Path, *, replacing: bool = False, private: bool = False) -> Iterator[Path]:
    """A folder to fill that is renamed to `folder` when the block succeeds, and deleted otherwise.
    `replacing`: also replace a folder that is not empty. Until then it lies next to `folder` under
    a name that begins with a dot. Its files are flushed to disk before the rename. `private`:
    only its owner may look into it, at any time.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Named before and created inside the block, so that a signal right after its creation removes
    # it too. The random name is nobody else's.
    staging = folder.parent / f".{folder.name}-{secrets.token_hex(8)}"
    try:
        staging.mkdir(mode=0o700)
        yield staging
        stop_if_asked()
        _finish(staging, private=private)
        if replacing and folder.exists():
            shutil.rmtree(folder)
        elif folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _finish(folder: Path, *, private: bool) -> None:
    # The library that writes weights makes them readable by their owner only; services may run as
    # another user.
    folder.chmod(0o700 if private else 0o755)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o600 if private else 0o644)
            disk.sync_path(file)
