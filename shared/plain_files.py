"""Opens files of a folder, or of a configuration, that somebody else may have made: a name can be a
link to anywhere, a pipe that nobody writes to or a device that never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NO_FILE = (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR)
"""Error numbers of `open_plain` for a path without a file: nothing, a link, a pipe, a device or a
folder.
"""


def open_plain(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of the file at `path`, opened with these flags of `os.open`.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or a folder.
    """
    return _regular(path, flags | os.O_NOFOLLOW, mode)


def _regular(path: str | Path, flags: int, mode: int = 0o666) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_plain(path: Path, most_bytes: int) -> bytes:
    """The bytes of the file at `path`.

    Raises:
        OSError: as with `open_plain`, or the file has more than `most_bytes`.
    """
    return _read(open_plain(path), path, most_bytes)


def read_named(path: str | Path, most_bytes: int) -> bytes:
    """The bytes of the file that a setting names. Unlike `read_plain` it follows links, through
    which Kubernetes mounts each file of a Secret.

    Raises:
        OSError: it cannot be opened, is a pipe, a device or a folder, or has more than
            `most_bytes`.
    """
    return _read(_regular(path, os.O_RDONLY), path, most_bytes)


def _read(descriptor: int, path: str | Path, most_bytes: int) -> bytes:
    with open(descriptor, "rb") as file:
        content: bytes | None = file.read(most_bytes + 1)
    if content is None:  # a file of /proc that has nothing to say yet
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
    return content


def read_plain_end(path: Path, most_bytes: int) -> tuple[bytes, bool]:
    """The last `most_bytes` of the file at `path`, and whether that is the whole file.

    Raises:
        OSError: as with `open_plain`.
    """
    with open(open_plain(path), "rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - most_bytes))
        return file.read(most_bytes), size_bytes <= most_bytes


def whole_lines(file: BinaryIO, start: int, block_bytes: int = 2**22) -> Iterator[tuple[bytes, int]]:
    """The lines of an open file from `start` on, in blocks of at most `block_bytes`, each with the
    position behind it. A last line that has no end yet is left for the next time; of one longer
    than a block only the end is among the lines.
    """
    while True:
        file.seek(start)
        block = file.read(block_bytes)
        full = len(block) == block_bytes
        whole = block.rfind(b"\n") + 1 or (len(block) if full else 0)
        start += whole
        if whole:
            yield (block[:whole] if block.endswith(b"\n", 0, whole) else b""), start
        if not full:
            return
