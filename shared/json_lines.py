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
