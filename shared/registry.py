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
* `TASK_SOURCES`, `swarm.task_sources`, `dataset` in `[[tasks]]`: a function from (settings, seed)
  to a sequence of entries.
* `POLICY_STORES`, `swarm.policy_stores`, the scheme of `policy_store.uri`: a function from
  `StorePlace` to a `PolicyStore`.
* `TRACKERS`, `swarm.trackers`, `tracking.trackers`: a function from `TrackedRun`
  (services/trainer/tracking/base.py) to a `Tracker`.

Names are checked without importing anything, so that a process that must not load torch can read
the configuration. For the same reason built-in entries are given as `module:attribute` text. An
entry point never replaces a built-in entry. `docs/extend/` has a page for each registry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shared.suggestion import did_you_mean


class UnknownNameError(ValueError):
    """No entry has that name; the message lists or suggests the ones that exist."""


class BrokenEntryError(ValueError):
    """The entry of that name cannot be imported; the message says why."""


@dataclass(frozen=True)
class Registry:
    """The entries of one kind.

    kind: the word used in messages, as in `no objective is called 'dapp'`. group: the entry-point
    group. built_in: name to `module:attribute`.
    """

    kind: str
    group: str
    built_in: Mapping[str, str]

    def names(self) -> list[str]:
        """All names: built-in ones in their order, then installed ones, sorted."""
        return [*self.built_in, *sorted(set(self.installed) - set(self.built_in))]

    def load(self, name: str) -> Any:
        """Import and return the entry called `name`.

        Raises:
            UnknownNameError: there is none.
            BrokenEntryError: it cannot be imported.
        """
        if name not in self.built_in and name not in self.installed:
            raise UnknownNameError(self.unknown(name))
        try:
            if name in self.built_in:
                module, _, attribute = self.built_in[name].partition(":")
                return getattr(import_module(module), attribute)
            return self.installed[name].load()
        except Exception as error:  # noqa: BLE001  # another package's module may fail in any way
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            raise BrokenEntryError(f"{self.kind} {name} cannot be loaded: {reason}") from error

    def check(self, name: str, besides: Sequence[str] = ()) -> str:
        """Return `name`, or raise `UnknownNameError`. Imports nothing. `besides`: words that the
        setting also accepts.
        """
        if name not in self.built_in and name not in self.installed and name not in besides:
            raise UnknownNameError(self.unknown(name, besides))
        return name

    def unknown(self, name: str, besides: Sequence[str] = ()) -> str:
        """The message for an unknown name."""
        known = [*self.names(), *besides]
        hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
        return f"no {self.kind} is called {name!r}: {hint} (your own needs an entry point in the group {self.group})"

    def look_again(self) -> None:
        """Read the installed entry points again, after a package was added to this process."""
        self.__dict__.pop("installed", None)

    @cached_property
    def installed(self) -> Mapping[str, EntryPoint]:
        """Entry points of installed packages, by name; read once per process."""
        return {found.name: found for found in entry_points(group=self.group)}


def _objective(name: str) -> str:
    return f"services.trainer.objectives.{name}:OBJECTIVE"


def _strategy(name: str) -> str:
    return f"services.sampler.strategies.{name}:STRATEGY"


OBJECTIVES = Registry(
    "objective",
    "swarm.objectives",
    {
        name: _objective(name)
        for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce", "rloo", "m2po", "gepo", "vespo", "oapl")
    },
)
STRATEGIES = Registry(
    "strategy",
    "swarm.strategies",
    {
        name: _strategy(name)
        for name in ("uniform", "learnability", "spread", "freshness", "balanced", "rescue", "likelihood_near", "likelihood_far")
    },
)
ENGINES = Registry(
    "engine",
    "swarm.engines",
    {
        "vllm": "services.generator.engines.vllm_engine:open_engine",
        "transformers": "services.generator.engines.transformers_engine:open_engine",
        "openai": "services.generator.engines.openai_engine:open_engine",
    },
)
VERIFIERS = Registry(
    "verifier",
    "swarm.verifiers",
    {
        "reasoning_gym": "shared.tasks.verify_reasoning_gym:verifier",
        "exact": "shared.tasks.verify_exact:verifier",
        "final_number": "shared.tasks.verify_final_number:verifier",
        "math": "shared.tasks.verify_math:verifier",
    },
)
TASK_SOURCES = Registry("task source", "swarm.task_sources", {})
"""In addition to reasoning-gym's datasets, whose names are not available to task sources."""
POLICY_STORES = Registry(
    "policy store",
    "swarm.policy_stores",
    {"file": "shared.policy_store.volume:open_store", "nats": "shared.policy_store.jetstream:open_store"},
)
TRACKERS = Registry(
    "tracker",
    "swarm.trackers",
    {
        "tensorboard": "services.trainer.tracking.tensorboard_writer:open_tracker",
        "wandb": "services.trainer.tracking.wandb_writer:open_tracker",
        "trackio": "services.trainer.tracking.trackio_writer:open_tracker",
    },
)
