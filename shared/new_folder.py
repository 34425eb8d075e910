"""Folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_filled(folder: Path, purpose: str) -> None:
    """Raise FileExistsError unless `folder` does not exist or is an empty folder; `purpose` says what it is wanted for."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty: choose another folder for {purpose}")


@contextmanager
def appearing_whole(folder: Path, *, replacing: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes `folder` when the block ends well, and vanishes otherwise.

    `replacing`: in the place of a folder that may hold something. Until the end it lies beside it under a name that begins with a
    dot. Files are on the disk before the name is given.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield staging
        _finish(staging)
        if replacing and folder.exists():
            shutil.rmtree(folder)
        elif folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _finish(folder: Path) -> None:
    # The library that writes weights leaves them to their owner alone; services may run as another user.
    folder.chmod(0o755)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
