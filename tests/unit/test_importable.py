"""What a scorer may read of a folder of packages that is not this environment's own, such as those
of `pip install --target` and `--user`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.tasks.sandbox.importable import readable_paths


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
