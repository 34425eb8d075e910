"""Describes what is wrong with a configuration, one line per fault, and removes the faulty settings
so that the rest can be checked too. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shared.config.environment import ENV_PREFIX, setting_variables
from shared.config.meant_keys import meant_key
from shared.setting_names import setting_name
from shared.suggestion import did_you_mean
from shared.text import visible

Location = tuple[int | str, ...]
_KIND = re.compile(r"(?:literal|list|tuple|dict)\[.*\]|int|float|bool|str|none", re.DOTALL)
_LONGEST_VALUE = 200
"""Characters shown of a wrong value."""
_LONGEST_NAME = 1000
"""Of a setting: no real one is longer, and to make a pattern takes time with the square of it."""


def location_of(variable: str) -> Location:
    """The location of the setting that an environment variable sets."""
    return tuple(variable[len(ENV_PREFIX) :].lower().split("__"))


def variable_at(location: Location, variables: Mapping[str, str]) -> str | None:
    """The environment variable that sets the value at `location`, either directly or as JSON for
    the section or list around it. None if no variable does.
    """
    paths = {location_of(name): name for name in setting_variables(variables)}
    for length in range(len(location), 0, -1):
        name = paths.get(tuple(str(part) for part in location[:length]))
        if name is not None and (length == len(location) or reaches(_parsed(variables[name]), location[length:])):
            return name
    return None


class Fault(NamedTuple):
    """One thing that is wrong at `location`, which is empty for settings of several sections."""

    location: Location
    message: str

    def line(self, variables: Mapping[str, str]) -> str:
        """The field, or the variable that sets it, and what is wrong."""
        field = setting_name(self.location)
        variable = variable_at(self.location, variables)
        where = f"environment variable {variable} ({field})" if variable else field
        return f"{where}: {self.message}" if field else self.message

    def follows_from(self, removed: Iterable[Location], settings: type[BaseModel]) -> bool:
        """Check whether a setting may be wrong only because the settings at `removed` are no longer
        there: it is at one of them, or its message names one or the setting that was meant by it.
        """
        around = ".".join(part for part in self.location if isinstance(part, str))
        for location in removed:
            if location == self.location:
                return True
            if location[: len(self.location)] == self.location and any(
                _names(self.message, name, around) for name in _full_names(location, settings)
            ):
                return True
        return False


def faults_of(error: ValidationError, settings: type[BaseModel], places: Sequence[int] | None) -> list[Fault]:
    """The faults, several for a message of several lines, and one for a value that is none of
    several kinds. `places`: as in `in_users_list`.
    """
    found: dict[tuple[Location, str], list[str]] = {}
    for problem in error.errors():
        location, kind = _without_kind(problem)
        message, got, given = _message(problem, settings).partition(", got ") if kind else (_message(problem, settings), "", "")
        for line in message.splitlines():
            found.setdefault((in_users_list(location, places), got + given or line), []).append(line)
    return [Fault(location, _either(lines) + (got if got != lines[0] else "")) for (location, got), lines in found.items()]


def to_remove(error: ValidationError, settings: type[BaseModel], is_set: Callable[[Location], bool]) -> list[Location]:
    """Where the faulty settings are. If a section's settings do not go together, only those that
    the message names are faulty, or the section if it names none that is set.
    """
    found: list[Location] = []
    for problem in error.errors():
        location = problem["loc"]
        field = settings.model_fields.get(str(location[0])) if len(location) == 1 else None
        section = field.annotation if field else None
        keys = section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else ()
        named = [(*location, key) for key in keys if _names(problem["msg"], f"{location[0]}.{key}", str(location[0]))]
        found += [each for each in named if is_set(each)] or [location]
    return [location for location in dict.fromkeys(found) if location]


def in_users_list(location: Location, places: Sequence[int] | None) -> Location:
    """A location with the place that a `[[tasks]]` entry had before faulty ones were removed.
    `places`: those of the entries that are left; None if all are.
    """
    if places is None or len(location) < 2 or location[0] != "tasks" or not isinstance(location[1], int):
        return location
    return ("tasks", places[location[1]], *location[2:])


def places_left(entries: Sequence[Any], locations: Iterable[Location]) -> list[int]:
    """The places in the list `entries` of `[[tasks]]` that `without` does not remove."""
    gone = {
        each[1] for each in locations if each[:1] == ("tasks",) and len(each) > 1 and not (each[2:] and reaches(entries, each[1:3]))
    }
    return [place for place in range(len(entries)) if place not in gone]


def without(values: dict[str, Any], locations: Sequence[Location]) -> dict[str, Any]:
    """A copy of nested `values` without the values at `locations`; locations that do not exist are
    ignored.
    """
    pruned: dict[str, Any] = _copied(values)
    # In a list, remove later entries first, because removing an earlier one would shift them.
    for location in sorted(set(locations), key=lambda each: [str(part).rjust(9, "0") for part in each], reverse=True):
        _remove(pruned, location)
    return pruned


def _message(problem: ErrorDetails, settings: type[BaseModel]) -> str:
    """Describe the fault, with what was meant where pydantic's own words do not lead there."""
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        hint = meant_key(problem["loc"], settings) or "remove it or correct its spelling"
        return f"unknown key; {hint} (`swarm config show --all` lists all keys)"
    if problem["loc"] == ("tasks",) and isinstance(problem["input"], dict):
        return "is a single table, and must be a list of them: write [[tasks]] instead of [tasks]"
    if problem["loc"] and problem["type"] not in {"value_error", "missing"}:
        if problem["type"] == "string_pattern_mismatch":
            message = _in_words(str(problem.get("ctx", {}).get("pattern", ""))) or message
        message += f", got {visible(repr(problem['input']), _LONGEST_VALUE)}"
        if problem["type"] == "literal_error" and (hint := did_you_mean(str(problem["input"]), _choices(problem))):
            message += f"; {hint}"
        if problem["loc"][0] == "tasks" and problem["loc"][-1] == "dataset" and _is_path(problem["input"]):
            path = visible(json.dumps(problem["input"], ensure_ascii=False), _LONGEST_VALUE)
            message += f'; for a file write source = "file", path = {path} instead of dataset'
    return message


def _is_path(value: Any) -> bool:
    """Check whether it looks like the path of a file, such as `questions.jsonl`."""
    return isinstance(value, str) and ("/" in value or "." in value.strip("."))


def _without_kind(problem: ErrorDetails) -> tuple[Location, bool]:
    """Where the value is. For one that may be of several kinds, pydantic adds to the location which
    of them it is not; the second value says so.
    """
    location = problem["loc"]
    for place in (len(location) - 1, len(location) - 2):
        if place > 1 and problem["type"] != "extra_forbidden" and _KIND.fullmatch(str(location[place])):
            return (*location[:place], *location[place + 1 :]), True
    return location, False


def _either(lines: Sequence[str]) -> str:
    """Messages about one value as one: `Input should be A`, `Input should be B`."""
    first, *others = lines
    return " or ".join([first, *(line.removeprefix("Input should be ") for line in others)])


def _full_names(location: Location, settings: type[BaseModel]) -> list[str]:
    """The dotted name of the setting at `location`, and of those that may have been meant by it."""
    path = [part for part in location if isinstance(part, str)]
    meant = meant_key(location, settings) if path and location[-1] == path[-1] else ""
    words = [word for word in re.findall(r"[a-z_][a-z0-9_.]*", meant.removeprefix("did you mean ")) if word not in ("or", "and")]
    return [".".join(path), *(word if "." in word else ".".join([*path[:-1], word]) for word in words)]


def _names(message: str, name: str, around: str) -> bool:
    """Check whether a message about the section `around` names the setting `name`, in full or from
    there on.
    """
    if len(name) > _LONGEST_NAME:
        return False
    inner = name.removeprefix(f"{around}.")
    return re.search(rf"(?<![\w.])({re.escape(name)}|{re.escape(inner)})(?!\w)", message) is not None


def _in_words(pattern: str) -> str:
    """Describe a name's pattern; empty for other patterns."""
    if pattern.startswith("^(https?://"):
        return "must be an address that begins with http:// or https://"
    name = re.fullmatch(r"\^\(?\[[A-Za-z0-9-]+\]\[([^\]]+)\]\{0,(\d+)\}(?:\)\?)?\$", pattern)
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


def reaches(value: Any, location: Location) -> bool:
    """Check whether there is a value at `location` in nested `value`."""
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
        if last or not reaches(inner, location[depth + 1 : depth + 2]):
            del values[part]
            return
        values = inner
