"""Checks of what a configuration names: an objective and installed packages as the services would
take them, and as much of one with faults as is left to check.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from shared.config import NodeConfig, TaskSpec
from shared.config.meant_keys import meant_key
from shared.ignored_entries import chosen_entries
from shared.registry import ENGINES, OBJECTIVES, POLICY_STORES, STRATEGIES
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.errors import CommandError


def check_objective(config: NodeConfig) -> None:
    """Refuse an objective that the other settings do not allow, as the trainer would. Does not
    import torch itself, so that trying it is left to the trainer.
    """
    if problem := objective_problem(config, tried=False):
        raise CommandError(f"the configuration cannot be used:\n{problem}", EXIT_CONFIG)


def objective_problem(config: NodeConfig, *, tried: bool = True) -> str:
    """Why the trainer would refuse its objective; empty if it would not. tried: try the loss and
    the advantages of an installed one, for which torch is imported.
    """
    from services.trainer.objectives.config import configured_objective

    try:
        configured = configured_objective(config)
    except (ValueError, TypeError) as error:
        return str(error)
    if not tried or configured.name in OBJECTIVES.built_in:
        return ""
    from services.trainer.objectives.token_loss import trial_problem

    return trial_problem(configured)


def entry_problems(config: NodeConfig) -> list[str]:
    """Why a service would refuse a strategy, an engine or a policy store that the configuration
    chooses from an installed package. These are imported, but nothing is opened or started;
    built-in ones are not imported.
    """
    from services.sampler.strategies import strategy_named

    load = {STRATEGIES.kind: strategy_named, ENGINES.kind: ENGINES.load_function, POLICY_STORES.kind: POLICY_STORES.load_function}
    problems = []
    for _, registry, name in chosen_entries(config):
        if registry.kind in load and name not in registry.built_in:
            try:
                load[registry.kind](name)
            except ValueError as error:
                problems.append(str(error))
    return problems


class Checkable:
    """What is left to check of a configuration of which some settings were removed."""

    def __init__(self, config: NodeConfig, removed: Sequence[tuple[int | str, ...]] = (), task_places: Sequence[int] = ()) -> None:
        """`removed`, `task_places`: as in `ConfigError`; without them all can be checked."""
        self._config = config
        self._removed = removed
        self._places = task_places or range(len(config.tasks))

    def knows(self, *location: int | str) -> bool:
        """Whether the setting or section at `location` is as the user wrote it, and all in it."""
        removed = any(each[: len(location)] == location or location[: len(each)] == each for each in self._removed)
        return not removed and (_is_set(self._config, location) or not any(_may_mean(each, location) for each in self._removed))

    @property
    def model(self) -> bool:
        """Whether it is known which model is meant. A folder needs no revision."""
        folder = Path(self._config.model.path).is_dir()
        return self.knows("model", "path") and (folder or self.knows("model", "revision"))

    @property
    def key_files(self) -> NodeConfig:
        """The configuration without key files whose name contains an unknown node's."""
        if self.knows("node", "id"):
            return self._config
        nats = self._config.nats
        keys = {name: "" for name in ("node_key_file", "swarm_key_file") if "{node}" in getattr(nats, name)}
        return self._config.model_copy(update={"nats": nats.model_copy(update=keys)})

    @property
    def tasks(self) -> tuple[list[TaskSpec], list[int], int]:
        """Sources, their places in the user's list, and the number of held-out tasks; 0 if it is
        not known how they are split.
        """
        kept = [
            (spec, place)
            for spec, place in zip(self._config.tasks, self._places, strict=True)
            if self.knows("tasks", place, "question") and self.knows("tasks", place, "answer")
        ]
        split = len(kept) == len(self._config.tasks) and self.knows("tasks") and self.knows("eval", "tasks")
        return [spec for spec, _ in kept], [place for _, place in kept], self._config.eval.tasks if split else 0

    def not_of_defaults(self, problems: Sequence[str]) -> list[str]:
        """Those of `unreachable`'s sentences that are about the user's servers and ports."""
        sections = ("nats", "http", "generator")
        return [each for each in problems if all(self.knows(name) or not each.startswith(f"{name}.") for name in sections)]


def _is_set(config: BaseModel, location: Sequence[int | str]) -> bool:
    """Whether the user wrote the setting at `location`, or it is in a list, which has no
    defaults.
    """
    for part in location:
        if not isinstance(config, BaseModel):
            break
        if part not in config.model_fields_set:
            return False
        config = getattr(config, str(part))
    return True


def _may_mean(removed: Sequence[int | str], location: Sequence[int | str]) -> bool:
    """Whether `removed` is no setting and may be a misspelt `location`, or a section around it: by
    its spelling or, within one section, because nothing else is like it.
    """
    section = removed[:-1]
    if len(removed) > len(location) or tuple(location[: len(section)]) != tuple(section) or _exists(removed):
        return False
    meant = meant_key(removed, NodeConfig)
    return str(location[len(section)]) in re.findall(r"\w+", meant) if meant else len(removed) == len(location) > 1


def _exists(location: Sequence[int | str]) -> bool:
    fields = NodeConfig.model_fields
    for part in location:
        if part not in fields:
            return False
        inner = fields[str(part)].annotation
        fields = inner.model_fields if isinstance(inner, type) and issubclass(inner, BaseModel) else {}
    return True
