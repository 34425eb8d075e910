"""Refuses to start a run whose folder has links, pipes or devices through which its processes would
write elsewhere."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from shared.text import visible
from swarm_cli.errors import CommandError


def reject_escaping_links(folder: Path) -> None:
    """Raises CommandError if anything in `folder` is a link that leads out of it, a pipe or device,
    or a file that has a name elsewhere as well. Sockets and links within the folder stay, because a
    run makes those. `folder` itself may be a link: its owner has put it elsewhere.
    """
    inside = Path(os.path.realpath(folder))
    several: dict[tuple[int, int], list[Path]] = {}
    for place, folders, files in os.walk(inside):
        for path in (Path(place) / name for name in folders + files):
            try:
                found = path.lstat()
            except OSError:  # gone meanwhile
                continue
            kind = found.st_mode
            if stat.S_ISREG(kind) and found.st_nlink > 1:
                several.setdefault((found.st_dev, found.st_ino), []).append(path)
            if stat.S_ISLNK(kind) and not _within(path, inside) and not _is_wandb_s(path, inside):
                what = f"is a link to {visible(os.readlink(path), 200)}, out of the run's folder"
            elif stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
                what = "is a pipe or device"
            else:
                continue
            raise _escape_error(folder / path.relative_to(inside), what)
    for names in several.values():
        with suppress(OSError):  # gone meanwhile
            if names[0].lstat().st_nlink > len(names) and not all(_is_newest_policy(name, inside) for name in names):
                what = "is a file that has a name outside the run's folder as well (a hard link)"
                raise _escape_error(folder / names[0].relative_to(inside), what)


def _escape_error(path: Path, what: str) -> CommandError:
    return CommandError(
        f"{visible(str(path))} {what}, which no run makes: what the run writes there would go elsewhere; if you trust the run, "
        "remove that or put a copy in its place, or choose another name with --run"
    )


def _is_newest_policy(file: Path, folder: Path) -> bool:
    """A node's newest policy may be the same file in a volume elsewhere; under this name it is only
    ever removed or replaced. Under any other name in the folder it would be written to.
    """
    return file.relative_to(folder).parts[1:] == ("published", "newest.safetensors")


def _within(link: Path, folder: Path) -> bool:
    return Path(os.path.realpath(link)).is_relative_to(folder)


def _is_wandb_s(link: Path, folder: Path) -> bool:
    """Weights & Biases leaves a link to its process's log, and writes to no earlier run's."""
    parts = link.relative_to(folder).parts
    return len(parts) == 5 and parts[1] == "wandb" and parts[3:] == ("logs", "debug-core.log")
