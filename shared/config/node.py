"""The whole configuration of a node: what generator and trainer read, and commands that start or
check services.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from pydantic.fields import FieldInfo

from shared.config.load import SECTIONS, ConfigError, Entry, Location, Sources, built, load, read_sources, variable_at
from shared.config.model_section import ModelSection, PolicyStoreSection
from shared.config.trainer_section import TrackingSection, TrainerSection
from shared.config.verifier_config import VerifierConfig
from shared.registry import ENGINES, OBJECTIVES, POLICY_STORES, TASK_SOURCES, TRACKERS, policy_store_name


class NodeConfig(VerifierConfig):
    """The configuration of a node's four services."""

    model: ModelSection = Field(default_factory=ModelSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    policy_store: PolicyStoreSection = Field(default_factory=PolicyStoreSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    def problems(self) -> Iterator[str]:
        """As in the base class."""
        yield from super().problems()
        if self.generator.engine == "openai" and not self.generator.openai_url:
            yield "generator.engine is openai: set generator.openai_url to the server's base URL"

    def entries(self) -> Iterator[Entry]:
        """As in the base class."""
        yield "trainer", OBJECTIVES.kind, self.trainer.objective
        if self.generator.engine != "auto":
            yield "generator", ENGINES.kind, self.generator.engine
        yield "trainer", POLICY_STORES.kind, policy_store_name(self.policy_store_uri)
        for name in dict.fromkeys(spec.dataset for spec in [*self.tasks, *self.eval.sets]):
            yield "generator", TASK_SOURCES.kind, name
        if isinstance(self.tracking.trackers, list):
            for name in self.tracking.trackers:
                yield "trainer", TRACKERS.kind, name
        yield from super().entries()

    @property
    def policy_store_uri(self) -> str:
        """The policy store's URI; by default a folder in the run's folder."""
        return self.policy_store.uri or (self.node.run_dir / "policies").absolute().as_uri()

    @classmethod
    def sections(cls) -> dict[str, FieldInfo]:
        """The sections by name, in the order in which people read them."""
        return {name: cls.model_fields[name] for name in SECTIONS}


def load_config(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> NodeConfig:
    """Load and check a node's whole configuration. Arguments and errors are those of `load`."""
    return load(NodeConfig, path, overrides, environment)


class SoundValues(NamedTuple):
    """The values of a configuration that are not at fault. `config`: these alone, in sections that
    need not fit together. `removed`: what is not in it, as `("trainer", "learning_rate")`; of a
    faulty task source the whole entry, as `("tasks", 0)`. `places`: the place in the list, as it
    was written, of each task source that is left.
    """

    config: NodeConfig
    removed: frozenset[Location]
    places: tuple[int, ...]


def sound_values(path: Path, error: ConfigError) -> SoundValues | None:
    """The values of a file and the environment without those at fault; None if that cannot be told.
    error: of `load_config`.
    """
    if error.places is None:
        return None
    sources, _ = read_sources(NodeConfig, path, None)
    removed = {_removed_with(location) for location in error.places if location}
    tasks = sources.file.get("tasks")
    places = tuple(place for place in range(len(tasks) if isinstance(tasks, list) else 0) if ("tasks", place) not in removed)
    at_fault = {variable_at(location, sources.variables) for location in error.places}
    variables = {name: value for name, value in sources.variables.items() if name not in at_fault}
    config, _, still = built(NodeConfig, Sources(_without(sources.file, removed), variables), {}, apart=True)
    if config is None or still:
        return None
    written = len(places) == len(config.tasks)
    return SoundValues(config, frozenset(removed), places if written else tuple(range(len(config.tasks))))


def _removed_with(location: Location) -> Location:
    """The entry or key to remove for a fault at `location`: lists of plain values go as a whole."""
    place = next((place for place, part in enumerate(location) if isinstance(part, int)), None)
    if place is None:
        return location
    return location[: place + 1] if location[0] == "tasks" else location[:place]


def _without(values: Mapping[str, Any], removed: Iterable[Location], at: Location = ()) -> dict[str, Any]:
    """A copy of nested values without those at `removed`."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        here = (*at, name)
        if here in removed:
            continue
        if isinstance(value, Mapping):
            kept[name] = _without(value, removed, here)
        elif isinstance(value, list):
            kept[name] = [each for place, each in enumerate(value) if (*here, place) not in removed]
        else:
            kept[name] = value
    return kept
