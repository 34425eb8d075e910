"""What can be chosen by name: what is built in is there, what is not is said, and what is installed
is found.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.trainer.objectives.base import Objective
from shared import registry
from shared.config import ConfigError, load_config
from shared.registry import AmbiguousNameError, BrokenEntryError, Registry, UnknownNameError
from tests.installed_packages import forget, install
from tests.objectives import configured

REGISTRIES = {name: each for name, each in vars(registry).items() if isinstance(each, Registry)}


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRIES)
def test_everything_built_in_can_be_loaded(name: str) -> None:
    one = REGISTRIES[name]
    assert all(one.load(each) is not None for each in one.built_in)


def test_every_objective_is_called_what_it_is_found_by() -> None:
    found = {name: registry.OBJECTIVES.load(name) for name in registry.OBJECTIVES.built_in}
    assert all(isinstance(each, Objective) for each in found.values())
    assert {name: each.name for name, each in found.items()} == {name: name for name in found}


def test_a_close_name_is_suggested_and_others_are_listed() -> None:
    with pytest.raises(UnknownNameError, match=r"no objective is called 'dap0': did you mean dapo\?"):
        registry.OBJECTIVES.load("dap0")
    with pytest.raises(UnknownNameError, match="there are .*grpo.*entry point in the group swarm.objectives"):
        registry.OBJECTIVES.check("zzz")


def with_entry(value: str) -> Registry:
    one = Registry("objective", "swarm.objectives", "trainer.objective", {"dapo": "services.trainer.objectives.dapo:OBJECTIVE"})
    one.__dict__["installed"] = {name: [EntryPoint(name=name, value=value, group="swarm.objectives")] for name in ("mine", "dapo")}
    return one


def test_an_installed_entry_is_found_and_replaces_nothing() -> None:
    one = with_entry("services.trainer.objectives.grpo:OBJECTIVE")
    assert one.names() == ["dapo", "mine"]
    assert one.load("mine").name == "grpo"
    assert one.load("dapo").name == "dapo"


@pytest.mark.parametrize("value", ["no.such.module:X", "services.trainer.objectives.grpo:NOTHING"])
def test_a_broken_entry_is_named_with_its_reason(value: str) -> None:
    with pytest.raises(BrokenEntryError, match=r"objective mine of the package \(unknown\) cannot be loaded: \w+Error: "):
        with_entry(value).load("mine")


def test_an_entry_that_is_no_objective_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.OBJECTIVES.__dict__, "installed", with_entry("math:pi").installed)
    with pytest.raises(TypeError, match="objective mine of the package .* is a float: its entry point must name an Objective"):
        configured("mine")


@pytest.mark.slow
def test_a_configuration_is_held_to_what_its_objective_says_without_loading_torch() -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from services.trainer.objectives.config import configured_objective\n"
            "from shared.config import load_config\n"
            "from shared.registry import OBJECTIVES\n"
            "for name in OBJECTIVES.built_in:\n"
            "    configured_objective(load_config(None, {'tasks': [{'dataset': 'gcd'}], 'trainer': {'objective': name}}))\n"
            "print('torch' in sys.modules)\n",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.stdout.strip() == "False", said.stderr


EXITS = "import sys\nsys.exit('there is no key')\n"


@pytest.fixture(autouse=True)
def _forget_packages() -> Iterator[None]:
    yield
    forget()


def test_a_package_that_exits_when_imported_is_a_broken_entry_with_its_package_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", EXITS)
    wanted = "objective mine of the package my-package cannot be loaded: SystemExit: there is no key: .* trainer.objective"
    with pytest.raises(BrokenEntryError, match=wanted):
        registry.OBJECTIVES.load("mine")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError: "),
        ("class Panic(BaseException): pass\nraise Panic('index 9 of 3')", "Panic: index 9 of 3"),
        (
            "class Mute(Exception):\n    def __str__(self): return self.text\nraise Mute",
            r"Mute: \(.* cannot be read: AttributeError\)",
        ),
    ],
)
def test_what_is_no_ordinary_exception_is_told_like_one_when_a_package_raises_it(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", code)
    with pytest.raises(BrokenEntryError, match=f"objective mine of the package my-package cannot be loaded: {words}"):
        registry.OBJECTIVES.load("mine")


def test_an_interruption_by_the_user_is_not_taken_for_a_packages_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry.OBJECTIVES.load("mine")


def test_a_package_without_metadata_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("second", "first"):
        install(tmp_path, monkeypatch, "swarm.objectives", "mine", EXITS, package=package)
    (tmp_path / "first-1.0.dist-info/METADATA").unlink()
    with pytest.raises(AmbiguousNameError, match=r"several packages, first-1\.0\.dist-info and second: uninstall"):
        registry.OBJECTIVES.check("mine")


def test_an_entry_that_must_be_called_and_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "swarm.engines", "mine", "mine = 'an engine'\n")
    with pytest.raises(BrokenEntryError, match="engine mine of the package my-package is a str: .* must name a function"):
        registry.ENGINES.load_function("mine")


def test_a_name_that_two_packages_use_is_refused_wherever_it_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("second", "first"):
        install(tmp_path, monkeypatch, "swarm.strategies", "mine", EXITS, package=package)
    assert registry.STRATEGIES.names()[-1] == "mine"
    wanted = "strategy mine is an entry point of several packages, first and second: uninstall"
    for chosen in (registry.STRATEGIES.load, registry.STRATEGIES.check):
        with pytest.raises(AmbiguousNameError, match=wanted):
            chosen("mine")
    with pytest.raises(ConfigError, match=f"sampler.strategy: {wanted}"):
        load_config(None, {"tasks": [{"dataset": "gcd"}], "sampler": {"strategy": "mine"}})


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("my_store:///tmp/x", "'my_store' cannot be the scheme of a URI.*rename the entry point"),
        ("Upper:///tmp/x", "'Upper' cannot be the scheme of a URI.*only small letters"),
        ("file:/tmp/x", "'file:/tmp/x' has no scheme: write file:///folder"),
        ("://x", "'' cannot be the scheme"),
    ],
)
def test_a_configuration_accepts_only_a_scheme_that_a_uri_can_have(uri: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"policy_store.uri: {words}"):
        load_config(None, {"tasks": [{"dataset": "gcd"}], "policy_store": {"uri": uri}})


@pytest.mark.parametrize("name", ["zstd", "a.b-c+d", "s3"])
def test_a_scheme_that_is_accepted_is_the_one_that_urlsplit_finds(name: str) -> None:
    assert registry.policy_store_name(f"{name}:///x") == name == urlsplit(f"{name}:///x").scheme
