"""What a scorer may read of a folder of packages that is not this environment's own, such as those
of `pip install --target` and `--user`, and where a process that starts in another folder finds it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.tasks.sandbox.confinement import path_from_elsewhere, readable_paths

ROOT = Path(__file__).parents[2]


def test_the_libraries_beside_a_package_are_readable_and_what_is_no_module_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of a wheel that could not load its libraries kept the verifier from starting."""
    for name in ("package", "package.libs", "package-1.0.dist-info", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "secret.txt").touch()
    monkeypatch.syspath_prepend(tmp_path)
    readable = {path.name for path in readable_paths() if path.parent == tmp_path}
    assert readable == {"package", "package.libs", "package-1.0.dist-info"}


def test_another_environments_packages_are_readable_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages without an `__init__.py` too, which nothing tells from other folders."""
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.syspath_prepend(packages)
    assert packages in readable_paths() and packages.parent not in readable_paths()


def told(code: str, cwd: Path, path: str, flag: str = "-P") -> str:
    """Return what a Python with this PYTHONPATH prints, which does not put `cwd` first as it would
    without the flag.
    """
    command = [sys.executable, flag, "-c", code]
    return subprocess.check_output(command, cwd=cwd, env={"PYTHONPATH": path}, timeout=60, text=True).rstrip("\n")


PASS_ON = f"""
import os, sys
sys.path.append({str(ROOT)!r})
from shared.tasks.sandbox.confinement import path_from_elsewhere
print(path_from_elsewhere(os.environ["PYTHONPATH"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("entries", ["libs", "libs:", ":libs", "libs::./more/../libs", "/nowhere:../beside", ":", ""])
def test_a_process_in_another_folder_imports_from_the_folders_that_this_one_imports_from(tmp_path: Path, entries: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    show = "import sys; print(sys.path)"
    assert told(show, there, told(PASS_ON, here, entries)) == told(show, here, entries)


@pytest.mark.slow
def test_a_process_that_ignores_the_variable_does_not_pass_it_on(tmp_path: Path) -> None:
    assert [told(PASS_ON, tmp_path, "/somewhere", flag) for flag in ("-P", "-E", "-I")] == ["/somewhere", "", ""]


def test_a_folder_that_cannot_be_named_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts would be other folders, and an empty entry the one in which the other starts."""
    odd = tmp_path / "a:b"
    odd.mkdir()
    monkeypatch.chdir(odd)
    assert path_from_elsewhere("libs") == path_from_elsewhere(":") == ""
    assert path_from_elsewhere(f"libs:{tmp_path}:") == str(tmp_path)
    odd.rmdir()
    assert path_from_elsewhere(f"libs:{tmp_path}") == str(tmp_path)
