"""Load a node's configuration: TOML file, then environment (`SWARM_TRAINER__LEARNING_RATE=1e-5`),
then explicit overrides.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.config.environment import CONFIG_FILE_VARIABLE, ENV_PREFIX, environment_problems
from shared.config.faults import (
    Fault,
    Location,
    faults_of,
    in_users_list,
    location_of,
    places_left,
    reaches,
    to_remove,
    variable_at,
    without,
)
from shared.config.sections import (
    EvalSection,
    GeneratorSection,
    HttpSection,
    LogSection,
    ModelSection,
    NatsSection,
    NodeSection,
    PolicyStoreSection,
    SamplerSection,
    TaskSpec,
    TrainerSection,
    VerifierSection,
)
from shared.config.telemetry_sections import TracingSection, TrackingSection
from shared.os_words import in_words
from shared.plain_files import read_named
from shared.roles import ROLES


class ConfigError(ValueError):
    """The configuration is invalid. The message names each field, its problem and where the value
    came from. `rest` is the configuration without the faulty settings, so that further checks can
    report all mistakes at once; None if nothing usable is left. `faults`: the message's lines, one
    for each problem; empty if the file could not be read. `task_places`: where the `[[tasks]]`
    entries of `rest` were before faulty ones were removed; empty if none was. `removed`: where the
    faulty settings were.
    """

    def __init__(
        self,
        message: str,
        rest: NodeConfig | None = None,
        faults: Sequence[str] = (),
        task_places: Sequence[int] = (),
        removed: Sequence[Location] = (),
    ) -> None:
        super().__init__(message)
        self.rest = rest
        self.faults = faults
        self.task_places = task_places
        self.removed = removed


class NodeConfig(BaseSettings):
    """The configuration of a node's four services."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, nested_model_default_partial_update=True
    )

    node: NodeSection = Field(default_factory=NodeSection)
    nats: NatsSection = Field(default_factory=NatsSection)
    model: ModelSection = Field(default_factory=ModelSection)
    tasks: list[TaskSpec] = Field(default_factory=list)
    generator: GeneratorSection = Field(default_factory=GeneratorSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    verifier: VerifierSection = Field(default_factory=VerifierSection)
    sampler: SamplerSection = Field(default_factory=SamplerSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    policy_store: PolicyStoreSection = Field(default_factory=PolicyStoreSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    tracing: TracingSection = Field(default_factory=TracingSection)
    http: HttpSection = Field(default_factory=HttpSection)
    log: LogSection = Field(default_factory=LogSection)

    @model_validator(mode="after")
    def _combinations(self) -> NodeConfig:
        problems = [] if _current is not None and not _current.together else list(self.problems_together())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def problems_together(self) -> Iterator[str]:
        """Problems that involve several sections. Only what could never run is refused; `swarm
        config check` points out settings without effect.
        """
        if not self.tasks:
            yield (
                "tasks: at least one [[tasks]] entry is needed, because a configuration file replaces the demo's: begin "
                "with `swarm config show --all > node.toml`, or choose dataset names from `swarm task list`"
            )
        if self.sampler.local + self.sampler.external == 0:
            yield "sampler.local + sampler.external is 0: a batch would be empty; set at least one of them above 0"
        if self.sampler.external and self.nats.swarm_url is None:
            yield (
                f"sampler.external is {self.sampler.external} but nats.swarm_url is none: there is no swarm to receive foreign "
                "groups from; set sampler.external = 0 or set nats.swarm_url"
            )
        if self.generator.engine == "openai" and not self.generator.openai_url:
            yield "generator.engine is openai: set generator.openai_url to the server's base URL"

    @property
    def max_foreign_completions(self) -> int:
        """Completions accepted from a foreign group."""
        return self.verifier.max_foreign_completions or 2 * self.generator.completions

    @property
    def max_foreign_tokens(self) -> int:
        """Tokens of the longest foreign completion accepted."""
        return int(self.verifier.max_foreign_length * self.generator.max_new_tokens)

    @property
    def policy_store_uri(self) -> str:
        """The policy store's URI; by default a folder in the run's folder."""
        return self.policy_store.uri or (self.node.run_dir / "policies").absolute().as_uri()

    def http_port(self, role: str) -> int:
        """Port of a role's /metrics; 0: any free port."""
        if self.http.port is not None:
            return self.http.port
        offset = ROLES.index(role)
        return self.http.base_port + offset if self.http.base_port else 0

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Overrides, then environment, then the TOML file that `load_config` chose."""
        loading = _current or _Loading({}, {})
        if isinstance(env_settings, EnvSettingsSource):
            left_out = {name.lower() for name in loading.left_out}
            variables = {name.lower(): value for name, value in loading.environment.items()}
            env_settings.env_vars = {name: value for name, value in variables.items() if name not in left_out}
        return init_settings, env_settings, InitSettingsSource(settings_cls, loading.file)


@dataclass(frozen=True, slots=True)
class _Loading:
    """The sources of the configuration being loaded. pydantic-settings asks the class for its
    sources and passes nothing along, so this is kept in a module variable.

    environment: the variables. left_out: those that are not read. together: whether to check
    settings in combination. task_places: as in `ConfigError`; None if no entry was removed.
    """

    file: dict[str, Any]
    overrides: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    left_out: frozenset[str] = frozenset()
    together: bool = True
    task_places: tuple[int, ...] | None = None

    def config(self) -> NodeConfig:
        """Build the configuration. Raises ValidationError."""
        global _current
        _current = self
        try:
            return NodeConfig(**self.overrides)
        finally:
            _current = None

    def variables(self) -> dict[str, str]:
        """The environment without the variables in `left_out`."""
        return {name: value for name, value in self.environment.items() if name not in self.left_out}

    def without(self, locations: Sequence[Location]) -> _Loading:
        """The same sources without the settings at `locations`. What a variable sets stays in the
        file, where it may be right.
        """
        at_fault = {location: variable_at(location, self.variables()) for location in locations}
        in_overrides = [location for location in locations if reaches(self.overrides, location)]
        in_file = [location for location, name in at_fault.items() if name is None and location not in in_overrides]
        return _Loading(
            without(self.file, in_file),
            without(self.overrides, in_overrides),
            self.environment,
            self.left_out | {name for name in at_fault.values() if name},
            together=False,
            task_places=self._places_without(locations),
        )

    def has(self, location: Location) -> bool:
        """Check whether any source sets the value at `location`."""
        set_by_variable = variable_at(location, self.variables()) is not None
        return set_by_variable or reaches(self.overrides, location) or reaches(self.file, location)

    def _places_without(self, locations: Sequence[Location]) -> tuple[int, ...] | None:
        in_variable = "tasks" not in self.overrides and variable_at(("tasks",), self.variables()) is not None
        entries = (self.overrides if "tasks" in self.overrides else self.file).get("tasks")
        if in_variable or not isinstance(entries, list):
            return self.task_places
        left = places_left(entries, locations)
        known = range(len(entries)) if self.task_places is None else self.task_places
        return tuple(known[place] for place in left)


MAX_FILE_BYTES = 4 * 2**20
"""Of a file with settings or task sources: tens of thousands of entries."""
_current: _Loading | None = None
_ROUNDS = 8
"""How often faulty settings are removed, because each removal may uncover others."""


def load_config(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> NodeConfig:
    """Load and check a node's configuration.

    Args:
        path: TOML file; None uses the file that `SWARM_CONFIG` names, if any.
        overrides: Nested values that override everything, e.g. `{"node": {"id": "beta"}}`.
        environment: Variables; None uses this process's.

    Raises:
        ConfigError: with one line per problem: field or environment variable, what is wrong, what
            was given.
    """
    told = os.environ if environment is None else environment
    chosen = path or (Path(told[CONFIG_FILE_VARIABLE]) if told.get(CONFIG_FILE_VARIABLE) else None)
    misread = environment_problems(told, NodeConfig)
    loading = _Loading({}, dict(overrides or {}), told, frozenset(misread))
    try:
        loading = replace(loading, file=_read_toml(chosen) if chosen is not None else {})
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *misread.values(), *_wrong_variables(loading)])) from None
    try:
        config = loading.config()
    except ValidationError as error:
        lines, rest, places, removed = _all_faults(loading, error)
        faults = [*misread.values(), *lines]
        raise ConfigError(_told(faults, chosen), rest, faults, places, [*map(location_of, misread), *removed]) from None
    if misread:
        faults = list(misread.values())
        raise ConfigError(_told(faults, chosen), config, faults, removed=list(map(location_of, misread)))
    return config


def _told(lines: list[str], file: Path | None) -> str:
    from_environment = all(line.startswith("environment variable") for line in lines)
    if len(lines) == 1 and from_environment:
        return lines[0]
    source = "the environment" if from_environment or file is None else str(file)
    return f"configuration from {source} cannot be used:\n" + "\n".join(f"  {line}" for line in lines)


def _all_faults(
    loading: _Loading, error: ValidationError
) -> tuple[list[str], NodeConfig | None, Sequence[int], Sequence[Location]]:
    """A line for every fault that can be found, the configuration without the faulty settings, its
    `task_places`, and where those settings were.

    Pydantic checks a section's settings together only where each is right by itself. So the faulty
    ones are removed, and what is then found is told too, unless the removal may have caused it.
    """
    lines: dict[str, None] = {}
    removed: list[Location] = []

    def add(faults: Sequence[Fault]) -> None:
        lines.update((fault.line(loading.variables()), None) for fault in faults if not fault.follows_from(removed, NodeConfig))

    for _ in range(_ROUNDS):
        add(faults_of(error, NodeConfig, loading.task_places))
        locations = to_remove(error, NodeConfig, loading.has)
        removed += [in_users_list(location, loading.task_places) for location in locations]
        loading = loading.without(locations)
        try:
            rest = loading.config()
        except ValidationError as further:
            error = further
        else:
            add([Fault((), problem) for problem in rest.problems_together()])
            return list(lines), rest, loading.task_places or (), removed
    return list(lines), None, (), removed


def _wrong_variables(loading: _Loading) -> list[str]:
    """The lines for what variables set wrongly, if the file cannot be read."""
    try:
        replace(loading, together=False).config()
    except ValidationError as error:
        variables = loading.variables()
        return [fault.line(variables) for fault in faults_of(error, NodeConfig, None) if variable_at(fault.location, variables)]
    return []


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_named(path, MAX_FILE_BYTES).decode())
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {path} does not exist: give another with --config or {CONFIG_FILE_VARIABLE}"
        ) from None
    except RecursionError:
        raise ConfigError(f"configuration file {path} cannot be read (nested too deep): correct the file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"configuration file {path} cannot be read ({in_words(error)}): correct the path or the file") from None
