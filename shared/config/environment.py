"""Checks the environment's `SWARM_` variables before pydantic reads them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from shared.suggestion import did_you_mean
from shared.text import visible

ENV_PREFIX = "SWARM_"
CONFIG_FILE_VARIABLE = "SWARM_CONFIG"


def setting_variables(variables: Iterable[str]) -> list[str]:
    """The names of the `SWARM_` variables that are settings, sorted."""
    return sorted(name for name in variables if name.startswith(ENV_PREFIX) and name != CONFIG_FILE_VARIABLE)


def environment_problems(variables: Mapping[str, str], settings: type[BaseModel]) -> dict[str, str]:
    """Problems by variable name: variables that name no section of `settings`, and plain text where
    JSON is needed.
    """
    problems = {}
    for name in setting_variables(variables):
        path = name[len(ENV_PREFIX) :].lower().split("__")
        if path[0] not in settings.model_fields:
            names = ", ".join(sorted([*settings.model_fields, "config"]))
            hint = did_you_mean(path[0], settings.model_fields)
            problems[name] = (
                f"environment variable {visible(name, 120)}: no section {visible(repr(path[0]), 120)}; "
                f"{f'{hint} ' if hint else ''}sections are {names}"
            )
            continue
        kinds = _kinds(settings, path)
        structured = [kind for kind in kinds if _is_structured(kind)]
        if structured and variables[name] not in _words(kinds) and not _is_json(variables[name]):
            form = _as_json(variables[name], structured[0])
            given = visible(repr(variables[name]), 200)
            problems[name] = f"environment variable {name} is {given}: give JSON, e.g. {visible(form, 200)}"
    return problems


def _kinds(settings: type[BaseModel], path: list[str]) -> list[Any]:
    """The types that the setting at `path` may have. Empty for an unknown setting, because pydantic
    has the better message for it.
    """
    kinds: list[Any] = [settings]
    for name in path:
        section = next((kind for kind in kinds if _is_section(kind)), None)
        if section is None or name not in section.model_fields:
            return []
        annotation = section.model_fields[name].annotation
        kinds = list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]
    return [kind for kind in kinds if kind is not NoneType]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_structured(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, dict) or _is_section(kind)


def _words(kinds: list[Any]) -> set[Any]:
    return {word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _as_json(text: str, kind: Any) -> str:
    """The JSON that was probably meant: for `1.5,3.0` it is `[1.5, 3.0]`."""
    section = '{"setting": "value"}'
    if get_origin(kind) not in (list, tuple):
        return section
    if any(map(_is_section, get_args(kind))):
        return f"[{section}]"
    items = [item.strip().strip("'\"") for item in text.strip("[]() ").split(",")]
    return json.dumps([json.loads(item) if _is_json(item) else item for item in items])
