"""Files with one JSON object per line, such as `metrics.jsonl` and `eval.jsonl`. A line is appended
completely or not at all; a torn line, left by a kill or a full disk, is skipped.
"""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path
from typing import Any

from shared.plain_files import NO_FILE, read_plain_end

_MOST_BYTES = 2**28


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; [] if the file does not exist or is a link, pipe or device.
    A line that is torn or still being written is skipped. Of a file of more than 256 MiB only
    the end is read.
    """
    try:
        content, whole = read_plain_end(path, _MOST_BYTES)
    except OSError as error:
        if error.errno in NO_FILE:
            return []
        raise
    lines = content.decode("utf-8", "replace").splitlines()
    objects = []
    for line in lines if whole else lines[1:]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def open_lines(path: Path) -> FileIO:
    """Open a file of lines for appending; a torn last line is ended first.

    Raises:
        OSError: the file cannot be opened.
    """
    stream = FileIO(path, "a+")
    size_bytes = os.fstat(stream.fileno()).st_size
    if size_bytes and os.pread(stream.fileno(), 1, size_bytes - 1) != b"\n":
        write_whole(stream, b"\n")
    return stream


def write_whole(stream: FileIO, line: bytes) -> None:
    """Append `line`, which includes its newline, to a file opened for appending.

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
    """A file of lines that never takes more space than twice `max_bytes`. When it is full it is
    renamed `<name>.old`, replacing the previous one, and a new file begins.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open nothing before the first line, so that an unwritable folder loses only the lines."""
        self._path = path
        self._max_bytes = max_bytes
        self._stream: FileIO | None = None

    def append(self, line: str) -> None:
        """Append one line, given without its newline. A line longer than `max_bytes` is dropped.

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
        """Close the file; the next line opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self) -> FileIO:
        if self._stream is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open_lines(self._path)
        return self._stream


def older(path: Path) -> Path:
    """The file in which `BoundedLines` keeps the lines that precede those of `path`."""
    return path.with_name(path.name + ".old")


def read_bounded(path: Path) -> list[dict[str, Any]]:
    """All objects that `BoundedLines` keeps, oldest first."""
    return [*read_jsonl(older(path)), *read_jsonl(path)]
