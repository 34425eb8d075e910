"""Refuses a store whose files are larger than they can be, before it is copied and a server reads
them: in a run that somebody handed on, a file of a kilobyte on disk can have terabytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
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


def refuse_ruinous_sizes(store: Path, streams: Iterable[Path]) -> None:
    """Raises CommandError if a file in `streams`, folders of `store`, is longer than a server makes
    any, or if all together are far longer than what they take on disk.
    """
    apparent = 0
    real: dict[tuple[int, int], int] = {}
    for stream in streams:
        for place, _, names in os.walk(stream):
            for path in (Path(place) / name for name in names):
                try:
                    found = path.lstat()
                except FileNotFoundError:
                    continue
                if found.st_size > MAX_FILE_BYTES:
                    raise CommandError(
                        f"{visible(str(path))} has {found.st_size / 2**20:,.0f} MiB; no NATS server makes a file of more than "
                        f"{MAX_FILE_BYTES // 2**20} MiB: look only at runs that you trust"
                    )
                apparent += found.st_size
                real[found.st_dev, found.st_ino] = found.st_blocks * 512
    if apparent > MAX_UNFOLDED * sum(real.values()) + SLACK_BYTES:
        raise CommandError(
            f"the files in {visible(str(store))} have {apparent / 2**20:,.0f} MiB but take {sum(real.values()) / 2**20:,.0f} MiB "
            "on disk (holes, or one file under many names), which no NATS server makes: look only at runs that you trust"
        )
