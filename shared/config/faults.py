"""Describes what is wrong with a configuration, one line per fault, and removes the faulty settings
so that the rest can be checked too. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shared.config.environment import ENV_PREFIX, setting_variables
from shared.config.meant_keys import meant_key
from shared.suggestion import did_you_mean

Location = tuple[int | str, ...]


def variable_at(location: Location, variables: Mapping[str, str]) -> str | None:
    """The environment variable that sets the value at `location`, either directly or as JSON for
    the section or list around it. None if no variable does.
    """
    paths = {tuple(name[len(ENV_PREFIX) :].lower().split("__")): name for name in setting_variables(variables)}
    for length in range(len(location), 0, -1):
        name = paths.get(tuple(str(part) for part in location[:length]))
        if name is not None and (length == len(location) or _reaches(_parsed(variables[name]), location[length:])):
            return name
    return None


def fault_lines(error: ValidationError, settings: type[BaseModel], variables: Mapping[str, str]) -> list[str]:
    """One line per fault: the field, or the variable that sets it, and what is wrong."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        variable = variable_at(problem["loc"], variables)
        where = f"environment variable {variable} ({field})" if variable else field
        message = _message(problem, settings)
        # The checks of several settings together already give one line per problem.
        lines += [f"{where}: {message}"] if field else message.splitlines()
    return lines


def without(values: dict[str, Any], locations: Sequence[Location]) -> dict[str, Any]:
    """A copy of nested `values` without the values at `locations`; locations that do not exist are
    ignored.
    """
    pruned: dict[str, Any] = _copied(values)
    # In a list, remove later entries first, because removing an earlier one would shift them.
    for location in sorted(locations, key=lambda each: [str(part).rjust(9, "0") for part in each], reverse=True):
        _remove(pruned, location)
    return pruned


def _message(problem: ErrorDetails, settings: type[BaseModel]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        hint = meant_key(problem["loc"], settings) or "remove it or correct its spelling"
        return f"unknown key; {hint} (`swarm config show --all` lists all keys)"
    if problem["loc"] and problem["type"] not in {"value_error", "missing"}:
        if problem["type"] == "string_pattern_mismatch":
            message = _in_words(str(problem.get("ctx", {}).get("pattern", ""))) or message
        message += f", got {problem['input']!r}"
        if problem["type"] == "literal_error" and (hint := did_you_mean(str(problem["input"]), _choices(problem))):
            message += f"; {hint}"
    return message


def _in_words(pattern: str) -> str:
    """What a name's pattern asks for; empty for other patterns."""
    name = re.fullmatch(r"\^\[[A-Za-z0-9-]+\]\[([^\]]+)\]\{0,(\d+)\}\$", pattern)
    if name is None:
        return ""
    letters = "letters" if "A-Z" in name[1] else "small letters"
    signs = [sign for sign in "._-" if sign in re.sub(r"\w-\w", "", name[1])]
    return f"must be 1 to {int(name[2]) + 1} {letters}, digits or {' '.join(signs)}, beginning with a letter or digit"


def _choices(problem: ErrorDetails) -> list[str]:
    """The values that a field accepts. pydantic lists them only in a sentence, in quotes."""
    return re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _reaches(value: Any, location: Location) -> bool:
    for part in location:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _remove(values: Any, location: Location) -> None:
    """A missing key is a fault of the table that lacks it, so then the table is removed."""
    for depth, part in enumerate(location):
        try:
            inner = values[part]
        except (KeyError, IndexError, TypeError):
            return
        last = depth == len(location) - 1
        if last or not _reaches(inner, location[depth + 1 : depth + 2]):
            del values[part]
            return
        values = inner
