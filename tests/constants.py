"""Sets the product's constants otherwise for a test, mostly to shorten its waits. A constant is a
class variable of its section in `shared.config`; nobody but tests turns it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from shared.config import NodeConfig, load_config
from shared.config.section import Section

VARIABLE = "TESTS_CONSTANTS"
"""Environment variable of a forked process (`tests.forked`) with constants, as JSON by section."""

AnySection = TypeVar("AnySection", bound=Section)


def section_with(section: AnySection, constants: Mapping[str, Any]) -> AnySection:
    """The section with these constants."""
    if not constants:
        return section
    kind = type(section)
    unknown = constants.keys() - kind.__class_vars__
    assert not unknown, f"no constants of {kind.__name__}: {unknown}"
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **constants}
    changed: Any = type(kind.__name__, (kind,), names | {"__annotations__": dict.fromkeys(constants, "ClassVar[Any]")})
    made: AnySection = changed.model_construct(set(section.model_fields_set), **dict(section))
    return made


def with_constants(config: NodeConfig, **sections: Mapping[str, Any]) -> NodeConfig:
    """The configuration with these constants, by section."""
    return config.model_copy(update={name: section_with(getattr(config, name), each) for name, each in sections.items()})


def split(kind: type[Section], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a section's `values` the settings, and the constants."""
    constants = {name: value for name, value in values.items() if name in kind.__class_vars__}
    return {name: value for name, value in values.items() if name not in constants}, constants


def load_with_constants(overrides: Mapping[str, Any]) -> NodeConfig:
    """The configuration of `overrides`, in which constants may be given like settings."""
    settings, constants = dict(overrides), {}
    for name, values in overrides.items():
        kind: Any = NodeConfig.model_fields[name].annotation
        if isinstance(values, dict):
            settings[name], constants[name] = split(kind, values)
    return with_constants(load_config(overrides=settings), **constants)


def as_variable(**sections: Mapping[str, Any]) -> dict[str, str]:
    """The environment variable that gives a forked process these constants."""
    return {VARIABLE: json.dumps(sections)}


def apply_variable(text: str) -> None:
    """Set the constants in `text` in this process."""
    for name, constants in json.loads(text).items():
        kind: Any = NodeConfig.model_fields[name].annotation
        for constant, value in constants.items():
            assert constant in kind.__class_vars__, f"{name}.{constant} is no constant"
            setattr(kind, constant, value)
