"""Load a node's configuration: TOML file, then environment (`SWARM_TRAINER__LEARNING_RATE=1e-5`),
then explicit overrides.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from shared.config.environment import CONFIG_FILE_VARIABLE, ENV_PREFIX, environment_problem
from shared.config.meant_keys import meant_key
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
from shared.suggestion import did_you_mean


class ConfigError(ValueError):
    """The configuration is invalid; the message names each field, its problem and where the value
    came from.
    """


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
        """What no single section can see. Only what could never run is refused; a setting without
        effect is `swarm config check`'s to point out.
        """
        if not self.tasks:
            raise ValueError("tasks: at least one [[tasks]] entry is needed; see `swarm task list` for dataset names")
        if self.sampler.local + self.sampler.external == 0:
            raise ValueError("sampler.local + sampler.external is 0: a batch would be empty; set at least one of them above 0")
        if self.sampler.external and self.nats.swarm_url is None:
            raise ValueError(
                f"sampler.external is {self.sampler.external} but nats.swarm_url is none: there is no swarm to receive foreign "
                "groups from; set sampler.external = 0 or give nats.swarm_url"
            )
        if self.sampler.strategy == "bandit" and not self.eval.tasks:
            raise ValueError("sampler.strategy bandit learns from held-out results: set eval.tasks above 0, or another strategy")
        if self.generator.engine == "openai" and not self.generator.openai_url:
            raise ValueError("generator.engine is openai: set generator.openai_url to the server's base URL")
        return self

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
        """The policy store's URI, the run's own folder by default."""
        return self.policy_store.uri or (self.node.run_dir / "policies").absolute().as_uri()

    def http_port(self, role: str) -> int:
        """Port of a role's /metrics; 0 lets the system choose."""
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
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, _current_file)


_current_file: Path | None = None


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> NodeConfig:
    """Load and check a node's configuration.

    Args:
        path: TOML file; None uses the file that `SWARM_CONFIG` names, if any.
        overrides: Nested values that override everything, e.g. `{"node": {"id": "beta"}}`.

    Raises:
        ConfigError: with one line per problem: field, what is wrong, what was given.
    """
    global _current_file
    chosen = path or (Path(os.environ[CONFIG_FILE_VARIABLE]) if os.environ.get(CONFIG_FILE_VARIABLE) else None)
    source = str(chosen) if chosen else "the environment"
    if chosen is not None:
        _check_toml(chosen)
    if problem := environment_problem(os.environ, NodeConfig):
        raise ConfigError(problem)
    _current_file = chosen
    try:
        return NodeConfig(**dict(overrides or {}))
    except ValidationError as error:
        raise ConfigError(explain(error, source)) from None
    finally:
        _current_file = None


def _check_toml(path: Path) -> None:
    try:
        tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {path} does not exist: give another with --config or {CONFIG_FILE_VARIABLE}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from None


def explain(error: ValidationError, source: str) -> str:
    """The problems of a configuration from `source`, one per line, each with the field's name."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            hint = meant_key(problem["loc"], NodeConfig) or "remove it or correct its spelling"
            message = f"unknown key; {hint} (`swarm config show --all` lists all keys)"
        elif field and problem["type"] not in {"value_error", "missing"}:
            message += f", got {problem['input']!r}"
            if problem["type"] == "literal_error" and (hint := did_you_mean(str(problem["input"]), _choices(problem))):
                message += f"; {hint}"
        lines.append(f"  {field}: {message}" if field else f"  {message}")
    return f"configuration from {source} cannot be used:\n" + "\n".join(lines)


def _choices(problem: ErrorDetails) -> list[str]:
    """The values that a field accepts; pydantic lists them in one sentence, in quotes."""
    return re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))
