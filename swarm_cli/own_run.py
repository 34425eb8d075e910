"""Tells a run that was started in its folder by this user from one that was copied there, and so
may be somebody else's.

Whoever makes a folder can write anything into it, but cannot foresee which number and time of
change its files get where they are unpacked. So after a start has written the run's note, it writes
down those of the note beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from shared.plain_files import open_plain, read_plain
from swarm_cli.replace_file import replace_file

NOTE = "up.json"
_MARK = "up.own"
_MARK_BYTES = 200


def mark_as_own(folder: Path) -> None:
    """Write down that the note in `folder` was written there. Raises CommandError if it cannot be
    written.
    """
    replace_file(folder / _MARK, _marks(folder)[1] + "\n")


def is_own(folder: Path) -> bool:
    """Whether this user, or root, wrote the note in `folder`, and in this folder. A run whose files
    were copied, or put back from a backup, is not: whoever has it may have written its note.
    """
    try:
        owner, mark = _marks(folder)
        return owner in (os.geteuid(), 0) and read_plain(folder / _MARK, _MARK_BYTES).decode().strip() == mark
    except (OSError, UnicodeDecodeError):
        return False


def _marks(folder: Path) -> tuple[int, str]:
    """The note's owner, and what no other file is like: device, number and time of change."""
    descriptor = open_plain(folder / NOTE)
    try:
        note = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return note.st_uid, f"{note.st_dev}:{note.st_ino}:{note.st_ctime_ns}"
