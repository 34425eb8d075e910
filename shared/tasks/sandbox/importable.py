"""The files that Python needs in order to import modules. A scorer may read these and no others.

Libraries import lazily, so a worker needs the files at any time. Installed packages are fully
readable, including another environment's (`pip install --user`, a .pth file). In any other folder
on the import path (a checkout, a folder in PYTHONPATH) only modules and packages are, because a
node's run folder may be next to them.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import all_suffixes
from pathlib import Path

_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
_DEVICES = ("/dev/urandom", "/dev/zero")
_MODULES = (".py", ".so", ".pyc", ".zip")
_OF_INSTALLED = ("site-packages", "dist-packages")
"""Names of folders that installers alone write to."""
_BESIDE_PACKAGES = (".dist-info", ".egg-info", ".libs")
"""A wheel's metadata, and the shared libraries that its modules load."""


def readable_paths() -> list[Path]:
    """Files and whole folders that a scorer may read."""
    installed = {Path(path) for path in sysconfig.get_paths().values()} | {Path(sys.base_prefix) / "lib"}
    readable = [*installed, *map(Path, _SYSTEM + _DEVICES), Path(sys.prefix) / "pyvenv.cfg", *_editable()]
    if "MPLCONFIGDIR" in os.environ:
        # Only its font cache, not the rest of a folder that may be /tmp.
        readable += Path(os.environ["MPLCONFIGDIR"]).glob("fontlist-*.json")
    for folder in import_folders():
        if not any(folder.is_relative_to(path) for path in installed):
            readable += [folder] if folder.name in _OF_INSTALLED else _modules(folder)
    # `os.path` reports a path that may not be looked at as missing.
    return [path for path in readable if os.path.exists(path)]


def import_folders() -> list[Path]:
    """The folders on the import path. Their listings must be readable, or nothing in them can be
    found.
    """
    return [folder for folder in (Path(entry or ".").absolute() for entry in sys.path) if os.path.isdir(folder)]


def path_from_elsewhere(entries: str) -> str:
    """The entries of this process's PYTHONPATH for one that starts in another folder, where a
    relative one would name another folder. An empty one is the folder of this process, as Python
    takes it, unless there is no other. Left out is what cannot be named so: a folder with a colon
    in its path, and a relative one if this process's own is gone. Empty if nothing is left, or if
    this process itself was told to import from none of them (`python -E`, `-I`).
    """
    if not entries or sys.flags.ignore_environment:
        return ""
    folders = []
    for entry in entries.split(os.pathsep):
        with suppress(FileNotFoundError):
            folders.append(os.path.abspath(entry))
    return os.pathsep.join(folder for folder in folders if os.pathsep not in folder)


def others_can_import() -> bool:
    """Whether a user without privileges can read all of it."""
    needed = {Path(sys.executable), Path(sysconfig.get_paths()["stdlib"]), *import_folders()}
    return all(_open_to_others(path.resolve()) for path in needed)


def _open_to_others(path: Path) -> bool:
    try:
        return path.stat().st_mode & 0o4 != 0 and all(folder.stat().st_mode & 0o1 for folder in path.parents)
    except OSError:
        return False


def _modules(folder: Path) -> Iterator[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if path.suffix in _MODULES + _BESIDE_PACKAGES or os.path.isfile(path / "__init__.py"):
            yield path


def _editable() -> Iterator[Path]:
    # Packages installed in place (setuptools): their finders know where they are.
    for name, module in list(sys.modules.items()):
        # Others are not asked: a module that imports on demand would fetch what is not installed.
        mapping = getattr(module, "MAPPING", None) if name.startswith("__editable__") else None
        if isinstance(mapping, dict):
            for path in map(Path, mapping.values()):
                # A package's folder; of a single module, its file without the suffix.
                yield path
                yield from (path.with_suffix(suffix) for suffix in all_suffixes())
