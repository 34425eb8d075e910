"""Packages with an entry point, installed for the time of a test as an installer would."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from shared import registry

REGISTRIES = {each.group: each for each in vars(registry).values() if isinstance(each, registry.Registry)}


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    name: str,
    code: str,
    *,
    attribute: str = "",
    package: str = "my-package",
) -> None:
    """Put a package, and its module with `code`, where this process and those that it starts find
    them. Its entry point `name` in `group` names `attribute` of the module, by default the one of
    the same name.
    """
    module = package.replace("-", "_") + "_module"
    (folder / f"{module}.py").write_text(code)
    described = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute or name}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    if str(folder) not in sys.path:
        monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
    REGISTRIES[group].look_again()


def forget() -> None:
    """Read the entry points again, after a test whose packages are no longer on the path."""
    for each in REGISTRIES.values():
        each.look_again()
