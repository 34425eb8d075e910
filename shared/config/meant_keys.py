"""Which setting was meant by a key that there is not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from shared.suggestion import did_you_mean


def meant_key(location: Sequence[int | str], settings: type[BaseModel]) -> str:
    """The question to ask about an unknown key at `location`, or nothing.

    Example: of `("trainer", "learing_rate")` it is `did you mean learning_rate?`; of
    `("trainer", "top_p")`, which another section has, `did you mean generator.top_p?`.
    """
    *path, key = location
    section = _section(path, settings)
    name = str(key)
    elsewhere = [found for found in _keys(settings) if found.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {' or '.join(sorted(elsewhere)[:3])}?"
    return did_you_mean(name, section.model_fields if section else ())


def _section(path: Sequence[int | str], settings: type[BaseModel]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = settings
    for name in path:
        if isinstance(name, int):
            continue  # of an entry in a list, whose section was found by the list's name
        field = section.model_fields.get(name) if section else None
        section = _as_section(field.annotation) if field else None
    return section


def _as_section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone or in a list."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = _as_section(field.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        elif name != "tasks":
            yield from _keys(inner, f"{prefix}{name}.")
