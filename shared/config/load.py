"""Load a node's configuration: TOML file, then environment (`SWARM_TRAINER__LEARNING_RATE=1e-5`),
then explicit overrides.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from shared.config.faults import fault_lines, variable_at, without
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
from shared.roles import ROLES


class ConfigError(ValueError):
    """The configuration is invalid. The message names each field, its problem and where the value
    came from. `rest` is the configuration without the faulty settings, so that further checks can
    report all mistakes at once; None if nothing usable is left. `faults`: the message's lines, one
    for each problem; empty if the file could not be read.
    """

    def __init__(self, message: str, rest: NodeConfig | None = None, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.rest = rest
        self.faults = faults


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
        problems = [] if _current is not None and not _current.together else list(self._problems_together())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _problems_together(self) -> Iterator[str]:
        """Problems that involve several sections. Only what could never run is refused; `swarm
        config check` points out settings without effect.
        """
        if not self.tasks:
            yield (
                "tasks: at least one [[tasks]] entry is needed, because a configuration file replaces the demo's: copy "
                "swarm_cli/local/defaults/demo.toml, or choose dataset names from `swarm task list`"
            )
        if self.sampler.local + self.sampler.external == 0:
            yield "sampler.local + sampler.external is 0: a batch would be empty; set at least one of them above 0"
        if self.sampler.external and self.nats.swarm_url is None:
            yield (
                f"sampler.external is {self.sampler.external} but nats.swarm_url is none: there is no swarm to receive foreign "
                "groups from; set sampler.external = 0 or set nats.swarm_url"
            )
        if self.sampler.strategy == "bandit" and not self.eval.tasks:
            yield "sampler.strategy bandit learns from held-out results: set eval.tasks above 0, or choose another strategy"
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
    settings in combination.
    """

    file: dict[str, Any]
    overrides: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    left_out: frozenset[str] = frozenset()
    together: bool = True

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

    def without(self, error: ValidationError) -> _Loading:
        """The same sources without the faulty settings."""
        locations = [problem["loc"] for problem in error.errors() if problem["loc"]]
        at_fault = {name for location in locations if (name := variable_at(location, self.variables()))}
        file, overrides = without(self.file, locations), without(self.overrides, locations)
        return _Loading(file, overrides, self.environment, self.left_out | at_fault, together=False)


_current: _Loading | None = None
_ROUNDS = 4
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
    file = _read_toml(chosen) if chosen is not None else {}
    misread = environment_problems(told, NodeConfig)
    loading = _Loading(file, dict(overrides or {}), told, frozenset(misread))
    try:
        config = loading.config()
    except ValidationError as error:
        faults = [*misread.values(), *fault_lines(error, NodeConfig, loading.variables())]
        raise ConfigError(_told(faults, chosen), _rest(loading, error), faults) from None
    if misread:
        raise ConfigError(_told(list(misread.values()), chosen), config, list(misread.values()))
    return config


def _told(lines: list[str], file: Path | None) -> str:
    from_environment = all(line.startswith("environment variable") for line in lines)
    if len(lines) == 1 and from_environment:
        return lines[0]
    source = "the environment" if from_environment or file is None else str(file)
    return f"configuration from {source} cannot be used:\n" + "\n".join(f"  {line}" for line in lines)


def _rest(loading: _Loading, error: ValidationError) -> NodeConfig | None:
    for _ in range(_ROUNDS):
        loading = loading.without(error)
        try:
            return loading.config()
        except ValidationError as further:
            error = further
    return None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {path} does not exist: give another with --config or {CONFIG_FILE_VARIABLE}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from None
