"""Registries of what a setting chooses by name: built-in entries, and those that installed packages
add as entry points.

Each registry with its entry-point group, the setting that names an entry, and the type of an entry:

* `OBJECTIVES`, `swarm.objectives`, `trainer.objective`: an `Objective`
  (services/trainer/objectives/base.py).
* `STRATEGIES`, `swarm.strategies`, `sampler.strategy`: a `Strategy`
  (services/sampler/strategies/base.py).
* `ENGINES`, `swarm.engines`, `generator.engine`: a function from `EngineSettings` to an `Engine`.
* `VERIFIERS`, `swarm.verifiers`, `verifier` in `[[tasks]]`: a function from a task to the scorer of
  its answers.
* `ENVIRONMENTS`, `swarm.environments`, `environment` in `[[tasks]]`: an `Environment`
  (shared/tasks/environments.py).
* `TASK_SOURCES`, `swarm.task_sources`, `dataset` in `[[tasks]]`: a function from (settings, seed)
  to a sequence of entries.
* `POLICY_STORES`, `swarm.policy_stores`, the scheme of `policy_store.uri`: a function from
  `StorePlace` to a `PolicyStore`.
* `TRACKERS`, `swarm.trackers`, `tracking.trackers`: a function from `TrackedRun`
  (services/trainer/tracking/base.py) to a `Tracker`.

Names are checked without importing anything, so that a process that must not load torch can read
the configuration. For the same reason built-in entries are given as `module:attribute` text. An
objective or a strategy is a file in its folder, and needs no word here. An entry point never
replaces a built-in entry (`Registry.ignored` says so), and a name that two packages use is refused.
`docs/extend/` has a page for each registry.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from shared.roles import Role
from shared.suggestions import did_you_mean
from shared.text import without_secrets
from shared.version import VERSION

PACKAGE_FAILURES = (Exception, SystemExit)
"""What code of an installed package usually raises: anything, and it may call `sys.exit`.
`plugin_errors` tells the rest too.
"""


class UnknownNameError(ValueError):
    """No entry has that name; the message lists or suggests the ones that exist."""


class AmbiguousNameError(ValueError):
    """Several packages have an entry of that name; the message names them."""


class BrokenEntryError(ValueError):
    """The entry of that name cannot be imported or used; the message says why."""


@dataclass(frozen=True)
class Registry:
    """The entries of one kind.

    kind: the word used in messages, as in `no objective is called 'dapp'`. group: the entry-point
    group. setting: the one that names an entry. built_in: name to `module:attribute`. taken:
    `module:attribute` of a function that returns further names, which are not installed packages'
    either; empty if there are none.
    """

    kind: str
    group: str
    setting: str
    built_in: Mapping[str, str]
    taken: str = ""

    def names(self) -> list[str]:
        """All names: built-in ones in their order, then installed ones, sorted."""
        return [*self.built_in, *sorted(set(self.installed) - set(self.built_in))]

    def load(self, name: str) -> Any:
        """Import and return the entry called `name`.

        Raises:
            UnknownNameError, AmbiguousNameError: as `check`.
            BrokenEntryError: it cannot be imported.
        """
        self.check(name)

        def broken(why: str) -> BrokenEntryError:
            return BrokenEntryError(f"{self.described(name)} cannot be loaded: {why}: correct that, or change {self.setting}")

        with plugin_errors(broken):
            return _imported(self.built_in[name]) if name in self.built_in else self.installed[name][0].load()

    def load_function(self, name: str) -> Callable[..., Any]:
        """`load` of an entry that must be callable. Raises `BrokenEntryError` also if it is not."""
        found: Callable[..., Any] = self.load(name)
        if not callable(found):
            raise BrokenEntryError(f"{self.described(name)} is a {type(found).__name__}: its entry point must name a function")
        return found

    def check(self, name: str, besides: Sequence[str] = ()) -> str:
        """Return `name`. Imports nothing. `besides`: words that the setting also accepts.

        Raises:
            UnknownNameError: nothing is called that.
            AmbiguousNameError: the entries of several packages are.
        """
        if name in self.built_in or name in besides:
            return name
        if name not in self.installed:
            raise UnknownNameError(self.unknown(name, besides))
        if len(self.installed[name]) > 1:
            raise AmbiguousNameError(
                f"{self.kind} {name} is an entry point of several packages, {self.packages(name)}: uninstall all but one of "
                f"them or rename their entry points (group {self.group})"
            )
        return name

    def ignored(self, name: str) -> str:
        """A sentence if a package has an entry point of this name that is not used, because the
        name is a built-in entry's; else empty. Imports only the module of `taken`, if at all.
        """
        if name not in self.installed or not (name in self.built_in or (self.taken and name in _imported(self.taken)())):
            return ""
        return (
            f"{self.setting} = {name} is the built-in {self.kind}, and the one of the package {self.packages(name)} is ignored: "
            "give its entry point another name to use it"
        )

    def code_id(self, name: str) -> str:
        """Identify the code behind an entry: the version of Swarm for a built-in one; for an
        installed one its entry points, each with its package's version and a hash of that
        package's Python files. Empty if there is no such entry. Imports nothing.
        """
        if name in self.built_in:
            return f"swarm {VERSION}"
        return "; ".join(
            sorted(f"{each.value} {_version(each)} {_source_hash(each.module)}" for each in self.installed.get(name, ()))
        )

    def described(self, name: str) -> str:
        """Name an entry by its kind, its name and its package."""
        installed = name in self.installed and name not in self.built_in
        return f"{self.kind} {name}" + (f" of the package {self.packages(name)}" if installed else "")

    def packages(self, name: str) -> str:
        """The packages that have an entry point of this name."""
        return " and ".join(sorted(map(_package, self.installed[name])))

    @cached_property
    def distributions(self) -> Mapping[str, tuple[str, str]]:
        """The package and its version behind each installed name."""
        return {name: (_package(entries[0]), _version(entries[0])) for name, entries in self.installed.items()}

    def unknown(self, name: str, besides: Sequence[str] = ()) -> str:
        """The message for an unknown name."""
        known = [*self.names(), *besides]
        hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
        return f"no {self.kind} is called {name!r}: {hint} (your own needs an entry point in the group {self.group})"

    def look_again(self) -> None:
        """Read the installed entry points again, after a package was added to this process."""
        for known in ("installed", "distributions"):
            self.__dict__.pop(known, None)

    @cached_property
    def installed(self) -> Mapping[str, Sequence[EntryPoint]]:
        """Entry points of installed packages, by name, one for each package that uses it; read once
        per process.
        """
        found: dict[str, list[EntryPoint]] = {}
        for each in entry_points(group=self.group):
            found.setdefault(each.name, []).append(each)
        return found


def _imported(text: str) -> Any:
    module, _, attribute = text.partition(":")
    return getattr(import_module(module), attribute)


def _package(entry: EntryPoint) -> str:
    """The name of an entry point's package; of one without METADATA, which an uninstallation that
    was cut short leaves behind, its folder.
    """
    if entry.dist is None:
        return "(unknown)"
    # Typed as text, and None without METADATA.
    name: str | None = entry.dist.name
    return name or PurePath(getattr(entry.dist, "_path", "(without a name)")).name


def _version(entry: EntryPoint) -> str:
    # Typed as text, and None without METADATA.
    version: str | None = entry.dist.version if entry.dist is not None else None
    return version or "(unknown)"


def _source_hash(module: str) -> str:
    """SHA-256 over the Python files of the package that `module` is in, or of the module itself if
    it is in none. An installation that is edited in place keeps its version, not this hash.
    """
    name, *inner = module.split(".")
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    if spec is not None and not places and spec.origin:
        places = [Path(spec.origin)]
    # Several distributions share a namespace package: go down to the package of this one.
    while inner and places and not any((place / "__init__.py").is_file() for place in places):
        below = [place / f"{inner[0]}{ending}" for place in places for ending in ("", ".py")]
        places, inner = [place for place in below if place.exists()], inner[1:]
    digest = hashlib.sha256()
    for place in places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            with suppress(OSError):
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"{file.relative_to(place)} {content}\n".encode())
    return digest.hexdigest()


def failure(error: BaseException) -> str:
    """Describe what a package's code raised in one short line, without secrets."""
    try:
        said = str(error)
    except PACKAGE_FAILURES as another:
        said = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {without_secrets(said)[:300]}"


@contextmanager
def plugin_errors(told: Callable[[str], Exception], *passing: type[Exception]) -> Iterator[None]:
    """Runs code of an installed package, and raises as `told(failure)` whatever it raises. That may
    be no `Exception`: a cancellation, or the panic of a library in Rust. An interruption by the
    user passes, and so do `passing`, whose messages say enough themselves.
    """
    through: tuple[type[BaseException], ...] = (KeyboardInterrupt, *passing)
    try:
        yield
    except through:
        raise
    except BaseException as error:
        raise told(failure(error)) from error


_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def policy_store_name(uri: str) -> str:
    """The name in `POLICY_STORES` that a URI chooses, which is its scheme.

    Only names that `urllib.parse.urlsplit` returns unchanged are accepted, because a store uses it
    to read the rest of its URI.

    Raises:
        ValueError: the URI has no scheme, or one that no URI can have.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        raise ValueError(f"{uri!r} has no scheme: write file:///folder or nats://")
    if not _SCHEME.fullmatch(scheme):
        raise ValueError(
            f"{scheme!r} cannot be the scheme of a URI, which has only small letters, digits, '+', '-' and '.' and starts with "
            f"a letter: rename the entry point (group {POLICY_STORES.group})"
        )
    return scheme


def _in_folder(package_attribute: str) -> dict[str, str]:
    """The entries of a folder, one file each: those that assign the attribute. An image without
    that service has none.
    """
    package, _, attribute = package_attribute.partition(":")
    folder = Path(__file__).parents[1].joinpath(*package.split("."))
    found = (file for file in sorted(folder.glob("*.py")) if f"\n{attribute} = " in file.read_text("utf-8"))
    return {file.stem: f"{package}.{file.stem}:{attribute}" for file in found}


OBJECTIVES = Registry("objective", "swarm.objectives", "trainer.objective", _in_folder("services.trainer.objectives:OBJECTIVE"))
STRATEGIES = Registry("strategy", "swarm.strategies", "sampler.strategy", _in_folder("services.sampler.strategies:STRATEGY"))
ENGINES = Registry(
    "engine",
    "swarm.engines",
    "generator.engine",
    {
        "vllm": "services.generator.engines.vllm_engine:open_engine",
        "transformers": "services.generator.engines.transformers_engine:open_engine",
        "openai": "services.generator.engines.openai_engine:open_engine",
    },
)
DEFAULT_VERIFIER = "reasoning_gym"
"""Scores the tasks of a `[[tasks]]` entry without `verifier`, other than a file's."""
SCORED_LOCALLY = frozenset({"simple_integration", "intermediate_integration"})
"""Datasets whose scorer there takes an answer that a stranger could have made to hide something
(`shared.tasks.scorers.integral`). No group of another node is taken with it.
"""
VERIFIERS = Registry(
    "verifier",
    "swarm.verifiers",
    "verifier in [[tasks]]",
    {
        "reasoning_gym": "shared.tasks.verify_reasoning_gym:verifier",
        "exact": "shared.tasks.verify_exact:verifier",
        "final_number": "shared.tasks.verify_final_number:verifier",
        "math": "shared.tasks.verify_math:verifier",
    },
)
ENVIRONMENTS = Registry("environment", "swarm.environments", "environment in [[tasks]]", {})
TASK_SOURCES = Registry("task source", "swarm.task_sources", "dataset in [[tasks]]", {}, taken="shared.tasks.derive:datasets")
"""In addition to reasoning-gym's datasets, whose names are not available to task sources."""
POLICY_STORES = Registry(
    "policy store",
    "swarm.policy_stores",
    "policy_store.uri",
    {"file": "shared.policy_store.volume:open_store", "nats": "shared.policy_store.jetstream:open_store"},
)
TRACKERS = Registry(
    "tracker",
    "swarm.trackers",
    "tracking.trackers",
    {
        "tensorboard": "services.trainer.tracking.writers:open_tensorboard",
        "wandb": "services.trainer.tracking.writers:open_wandb",
        "trackio": "services.trainer.tracking.writers:open_trackio",
    },
)


REGISTRIES = {
    each.kind: each for each in (OBJECTIVES, STRATEGIES, ENGINES, VERIFIERS, ENVIRONMENTS, TASK_SOURCES, POLICY_STORES, TRACKERS)
}
"""All registries, by what their entries are."""


def ignored_entries(entries: Iterable[tuple[Role, str, str]], role: Role | None = None) -> list[str]:
    """A sentence for each name of a configuration (`shared.config.load.Config.entries`) where a
    package's entry of that name is ignored. role: only names that it uses.
    """
    return [told for user, kind, name in entries if role in (None, user) and (told := REGISTRIES[kind].ignored(name))]


def finite_numbers(found: Any, count: int) -> list[float]:
    """`found`, of which nothing is taken for granted, as `count` finite numbers.

    Raises:
        ValueError: it is something else; the message says what, to follow "returned".
    """
    try:
        numbers = [float(each) for each in found]
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"a {type(found).__name__}, which is no list of numbers ({error})") from None
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers where {count} are needed")
    if wrong := [number for number in numbers if not math.isfinite(number)]:
        raise ValueError(f"the number {wrong[0]}, which is not finite")
    return numbers
