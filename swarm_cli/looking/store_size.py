"""Refuses a store whose files are larger than they can be, before it is copied and a server reads
them: in a run that somebody handed on, a file of a kilobyte on disk can have terabytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from shared.text import visible
from swarm_cli.errors import CommandError

MAX_FILE_BYTES = 256 * 2**20
"""A server's blocks have 8 MiB and at most one message of 64 MiB more; its lists of streams and
consumers are smaller.
"""
MAX_UNFOLDED = 16
SLACK_BYTES = 64 * 2**20
"""A file system that compresses keeps less than the files' sizes, though hardly a sixteenth."""


class Sizes:
    """What files have together, and what they take on disk, where one file under many names counts
    once.
    """

    def __init__(self) -> None:
        self._apparent = 0
        self._real: dict[tuple[int, int], int] = {}

    def add(self, found: os.stat_result) -> None:
        """Count a file under one of its names."""
        self._apparent += found.st_size
        self._real[found.st_dev, found.st_ino] = found.st_blocks * 512

    @property
    def ruinous(self) -> bool:
        """Whether they have far more than they take."""
        return self._apparent > MAX_UNFOLDED * sum(self._real.values()) + SLACK_BYTES

    def __str__(self) -> str:
        return f"{self._apparent / 2**20:,.0f} MiB, of which {sum(self._real.values()) / 2**20:,.0f} MiB are on disk"


def files_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All files in a folder and the folders in it, with what the system knows of each."""
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names):
            try:
                yield path, path.lstat()
            except FileNotFoundError:  # gone meanwhile
                continue


def refuse_ruinous_sizes(store: Path, streams: Iterable[Path]) -> None:
    """Raises CommandError if a file in `streams`, folders of `store`, is longer than a server makes
    any, or if all together are far longer than what they take on disk.
    """
    sizes = Sizes()
    for stream in streams:
        for path, found in files_in(stream):
            if found.st_size > MAX_FILE_BYTES:
                raise CommandError(
                    f"{visible(str(path))} has {found.st_size / 2**20:,.0f} MiB; no NATS server makes a file of more than "
                    f"{MAX_FILE_BYTES // 2**20} MiB: look only at runs that you trust"
                )
            sizes.add(found)
    if sizes.ruinous:
        raise CommandError(
            f"the files in {visible(str(store))} have {sizes} (holes, or one file under many names), which no NATS server makes: "
            "look only at runs that you trust"
        )
