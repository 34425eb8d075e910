"""Reports each mistake in a spec once, at its place in the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from shared.config.section import setting_name

Field = tuple[str | int, ...]


class Mistake(NamedTuple):
    """A mistake in an arm's `field`, which the arm's own table or the top of the spec may set."""

    arm: str
    field: Field
    message: str


def mistakes_of(error: ValidationError, arm: str = "", keys: str = "") -> list[Mistake]:
    """The mistakes in a pydantic error. `keys` says where the keys of what was checked are
    listed.
    """
    found = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "unknown key; remove it or correct its spelling" + (f" ({keys})" if keys else "")
        elif problem["type"] == "missing":
            message = "is missing"
        elif problem["loc"] and problem["type"] != "value_error":
            message += f", got {problem['input']!r}"
        found.append(Mistake(arm, tuple(problem["loc"]), message))
    return found


def told(mistakes: Iterable[Mistake], source: Mapping[str, Any]) -> list[str]:
    """One line per mistake. A mistake at the top of the spec, or in a field that no arm sets, is
    reported once and not for each arm.
    """
    arms: Mapping[str, Any] = source.get("arms") or {"base": {}}
    found = list(dict.fromkeys(mistakes))
    lines = []
    for mistake in found:
        sharing = {other.arm for other in found if other[1:] == mistake[1:]}
        # A missing key is located by the table that it belongs to.
        sought = mistake.field[:-1] if mistake.message == "is missing" else mistake.field
        own = bool(sought) and sets(arms.get(mistake.arm, {}), sought)
        common = not own and (sharing >= arms.keys() or (bool(sought) and sets(source, sought)))
        lines.append(_line(mistake.field if common else ("arms", mistake.arm, *mistake.field), mistake.message))
    return list(dict.fromkeys(lines))


def plain_lines(mistakes: Sequence[Mistake]) -> list[str]:
    """One line per mistake, for fields that belong to no arm."""
    return [_line(mistake.field, mistake.message) for mistake in mistakes]


def sets(table: Any, field: Field) -> bool:
    """Whether a table of the file sets a field. `nodes = 8` also sets `nodes.0.count`."""
    for part in field:
        if isinstance(table, Mapping):
            if part not in table:
                return False
            table = table[part]
        elif isinstance(table, list):
            if not isinstance(part, int) or part >= len(table):
                return False
            table = table[part]
        else:
            return True
    return True


def _line(field: Field, message: str) -> str:
    name = setting_name(field)
    return f"  {name}: {message}" if name else f"  {message}"
