"""The file of names and keys: lines `name key seen groups`, appended under a lock, so that replicas
on one machine agree.

`seen` is the Unix time of the newest accepted group when the line was written, `groups` the number
of accepted groups. Lines `name key` of earlier versions are also read; among them the first line of
a name and of a key counts. Incomplete or invalid lines are skipped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shared.drafts import replace_text
from shared.plain_files import whole_lines

_LINE = re.compile(r"([a-z0-9][a-z0-9-]{0,31}) (\S{1,64})(?: (\d{1,12}(?:\.\d{1,6})?) (\d{1,12}))?")


class NameLine(NamedTuple):
    """One line. `first_counts`: an earlier line of the name or key stays in force (lines of earlier
    versions).
    """

    name: str
    public_key: str
    seen_s: float
    groups: int
    first_counts: bool = False


class NamesFile:
    """Reads new lines of the file, appends lines, and rewrites the file when it has grown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read_bytes = 0
        self._torn = False
        self.lines = 0
        """Number of lines read so far."""
        path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block no other process appends or rewrites. Raises OSError if the folder
        cannot be written.
        """
        descriptor = os.open(self._path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def read(self) -> list[NameLine]:
        """The complete lines that were not read before; all lines if another process has rewritten
        the file.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._read_bytes:
                self._inode, self._read_bytes, self.lines = stat.st_ino, 0, 0
            found: list[NameLine] = []
            for block, end in whole_lines(file, self._read_bytes):
                self._read_bytes = end
                texts = block.decode(errors="replace").splitlines()
                self.lines += len(texts)
                found += [_parsed(match, stat.st_mtime) for text in texts if (match := _LINE.fullmatch(text))]
            self._torn = self._read_bytes < file.seek(0, os.SEEK_END)
        return found

    def append(self, line: NameLine) -> None:
        """Append a line; call it under the lock. Raises OSError if the disk refuses it."""
        # End a line that another process could not finish, so that it does not swallow this one.
        text = ("\n" if self._torn else "") + _text(line)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            written = os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
        self._torn = written < len(text)
        if self._torn:
            raise OSError(errno.ENOSPC, "part of a line was written", str(self._path))

    def rewrite(self, lines: Sequence[NameLine]) -> None:
        """Replace the file by these lines; call it under the lock."""
        replace_text(self._path, "".join(map(_text, lines)), mode=0o600, synced=True)
        stat = self._path.stat()
        self._inode, self._read_bytes, self._torn, self.lines = stat.st_ino, stat.st_size, False, len(lines)


def _text(line: NameLine) -> str:
    return f"{line.name} {line.public_key} {line.seen_s:.0f} {line.groups}\n"


def _parsed(match: re.Match[str], written_s: float) -> NameLine:
    name, public_key, seen_s, groups = match.groups()
    if seen_s is None:
        return NameLine(name, public_key, written_s, 0, first_counts=True)
    return NameLine(name, public_key, float(seen_s), int(groups))
