"""Refuse to start with packages that another project has replaced.

Swarm's packages are called `services`, `shared`, `swarm_cli`, `lab` and `monitoring`. In an
environment that Swarm shares, another project with a package `shared` overwrites ours when it is
installed, and deletes it when it is removed, without a word. So this module, which needs nothing
but Python, is imported before all else, and the check is made when it is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

EXIT_REPLACED = 78
"""The same as `shared.runtime.exits.EXIT_CONFIG`, which may be missing."""
PACKAGES = ("services", "shared", "swarm_cli")
_ROOT = Path(__file__).parents[1]
_OURS = "swarm_rl-*.dist-info"
_REMEDY = (
    "give Swarm an environment of its own: `python -m venv swarm-env`, then `swarm-env/bin/pip install` it there. To go on in this "
    "one, remove the other project and install Swarm again with `pip install --force-reinstall --no-deps`"
)


def problem(root: Path = _ROOT) -> str:
    """Describe what replaced the packages in `root`, with the remedy, or return "".

    An installed package is compared with the list of files that pip keeps of it. In a source tree
    there is none, and only another folder of the same name that Python finds first can be told.
    """
    records = [file for folder in root.glob(_OURS) if (file := folder / "RECORD").is_file()]
    wrong = next(_wrong_files(root, records[0]), "") if records else _found_first(root)
    return f"{wrong}: {_REMEDY}" if wrong else ""


def _wrong_files(root: Path, record: Path) -> Iterator[str]:
    """Files of ours that are missing, or that another distribution has replaced."""
    for line in record.read_text().splitlines():
        name, _, rest = line.partition(",")
        size = rest.rpartition(",")[2]
        if not name.endswith(".py") or not name.startswith(tuple(f"{package}/" for package in PACKAGES)):
            continue
        try:
            found = os.stat(root / name).st_size
        except OSError:
            yield f"the file {name} of Swarm is missing from {root}; most likely another project that has it too was removed"
            continue
        if size.isdigit() and found != int(size) and (other := _owner(root, name, record)):
            yield f"the file {name} of Swarm was replaced by the project {other}, which has a package of the same name in {root}"


def _owner(root: Path, name: str, ours: Path) -> str:
    """The other distribution that lists this file as its own; empty if none does."""
    for record in sorted(root.glob("*.dist-info/RECORD")):
        if record != ours and any(line.startswith(f"{name},") for line in record.read_text(errors="replace").splitlines()):
            return record.parent.name.removesuffix(".dist-info")
    return ""


def _found_first(root: Path) -> str:
    """Which package Python finds in another folder than this one."""
    for package in PACKAGES:
        loaded = sys.modules.get(package)
        spec = loaded.__spec__ if loaded else PathFinder.find_spec(package)
        if spec and spec.origin and Path(spec.origin).resolve().parents[1] != root.resolve():
            return f"Python finds the package {package} of another project, {spec.origin}, before Swarm's in {root}"
    return ""


if _problem := problem():
    print(f"swarm: {_problem}", file=sys.stderr)
    sys.exit(EXIT_REPLACED)
