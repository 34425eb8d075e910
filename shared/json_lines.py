"""Files with one JSON object per line, such as `metrics.jsonl` and `eval.jsonl`: a line is appended
completely or not at all, and a torn line, left by a kill or a full disk, is skipped.
"""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, [] when there is none. A line that is torn, or still being
    written, is left out.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    objects = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def open_lines(path: Path) -> FileIO:
    """Open a file of lines to add to it, after the end of a torn one.

    Raises:
        OSError: it cannot be opened.
    """
    stream = FileIO(path, "a+")
    size_bytes = os.fstat(stream.fileno()).st_size
    if size_bytes and os.pread(stream.fileno(), 1, size_bytes - 1) != b"\n":
        write_whole(stream, b"\n")
    return stream


def write_whole(stream: FileIO, line: bytes) -> None:
    """Add `line`, with its newline, to a file that is open for appending.

    Raises:
        OSError: such as a full disk; nothing of the line is left in the file.
    """
    size_bytes = os.fstat(stream.fileno()).st_size
    written = 0
    try:
        while written < len(line):
            written += stream.write(line[written:])
    except OSError:
        os.ftruncate(stream.fileno(), size_bytes)
        raise


class BoundedLines:
    """A file of lines that never takes more room than twice `max_bytes`: when it is full it becomes
    `<name>.old`, in place of the one before, and a new one begins.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Nothing is opened before the first line: a folder that cannot be written costs the lines
        alone.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._stream: FileIO | None = None

    def append(self, line: str) -> None:
        """Add one line, without its newline. A longer one than `max_bytes` is left out.

        Raises:
            OSError: such as a full disk; nothing of the line is left in the file.
        """
        content = line.encode() + b"\n"
        if len(content) > self._max_bytes:
            return
        stream = self._open()
        if os.fstat(stream.fileno()).st_size + len(content) > self._max_bytes:
            self.close()
            os.replace(self._path, older(self._path))
            stream = self._open()
        write_whole(stream, content)

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self) -> FileIO:
        if self._stream is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open_lines(self._path)
        return self._stream


def older(path: Path) -> Path:
    """Where `BoundedLines` keeps the lines before those of `path`."""
    return path.with_name(path.name + ".old")


def read_bounded(path: Path) -> list[dict[str, Any]]:
    """All objects that `BoundedLines` keeps, oldest first."""
    return [*read_jsonl(older(path)), *read_jsonl(path)]
