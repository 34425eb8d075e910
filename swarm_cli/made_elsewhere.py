"""Refuses what leads out of a run's folder that somebody else may have made: a link, through which
a file anywhere would be read or written, or a pipe, which would never end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shared.text import visible
from swarm_cli.errors import CommandError


def refuse_all_but_files(path: Path, maker: str) -> None:
    """Raises CommandError if `path` is neither a file nor a folder, because `maker` makes nothing
    else.
    """
    kind = path.lstat().st_mode
    if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
        raise CommandError(
            f"{visible(str(path))} is a link, pipe or device, which no {maker} makes: look only at runs that you trust"
        )


def refuse_what_leads_out(folder: Path) -> None:
    """Raises CommandError if anything in `folder` is a link that leads out of it, or a pipe or
    device. Sockets and links within the folder stay, because a run makes those. `folder` itself may
    be a link: its owner has put it elsewhere.
    """
    inside = Path(os.path.realpath(folder))
    for place, folders, files in os.walk(inside):
        for path in (Path(place) / name for name in folders + files):
            try:
                kind = path.lstat().st_mode
            except OSError:  # gone meanwhile
                continue
            if stat.S_ISLNK(kind) and not _within(path, inside) and not _is_wandb_s(path, inside):
                what = f"is a link to {visible(os.readlink(path), 200)}, out of the run's folder"
            elif stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
                what = "is a pipe or device"
            else:
                continue
            raise CommandError(
                f"{visible(str(folder / path.relative_to(inside)))} {what}, which no run makes: what the run writes there would go "
                "elsewhere; if you trust the run, remove that, or choose another name with --run"
            )


def _within(link: Path, folder: Path) -> bool:
    return Path(os.path.realpath(link)).is_relative_to(folder)


def _is_wandb_s(link: Path, folder: Path) -> bool:
    """Weights & Biases leaves a link to its process's log, and writes to no earlier run's."""
    parts = link.relative_to(folder).parts
    return len(parts) == 5 and parts[1] == "wandb" and parts[3:] == ("logs", "debug-core.log")
