"""`docs/settings.md`, from the sections that `load_config` checks a configuration against:
`python -m swarm_cli.settings_doc`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared.config import NodeConfig
from shared.config.environment import ENV_PREFIX
from swarm_cli.toml_view import toml_value

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
COMMAND = "python -m swarm_cli.settings_doc"
_HEAD = f"""# Settings

These are all settings of a node, with their defaults. A value comes from the environment variable,
else from the TOML file (`--config` or `SWARM_CONFIG`), else from the default; if no file is named,
`swarm up` and the other commands read the demo's. Write lists and tables in an environment variable
as JSON. This page is generated from the code by `{COMMAND}`; do not edit it.

    SWARM_TRAINER__LEARNING_RATE=1e-5 SWARM_TRAINER__VESPO_POSITIVE='[1.5, 3.0]' swarm up

There are two NATS settings: `nats.node_url` for the node's streams and `nats.swarm_url` for the
shared ones. With `nats.swarm_url = "none"` and `sampler.external = 0` a node trains alone. For a
cluster list all servers, separated by commas: nodes ignore servers that the cluster announces.

`swarm config show` prints the basic values in force as a TOML file (`--all`: all of them), and
`swarm config check` finds mistakes before anything starts. An error about an unknown setting or a value out of bounds names
the setting.
"""
_SIMPLE = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Path: "path", Any: "any value"}
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
_LENGTHS = {str: ("character", "characters"), list: ("entry", "entries")}


def render() -> str:
    """The page."""
    parts = [_HEAD]
    for name, field in NodeConfig.model_fields.items():
        parts.extend(_section(name, field.annotation))
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


def _section(path: str, annotation: Any) -> Iterator[str]:
    """A heading, what the section is about, and a table of its settings; then the same for the
    sections inside it.
    """
    several = get_origin(annotation) is list
    section = get_args(annotation)[0] if several else annotation
    inner = {name: field for name, field in section.model_fields.items() if _is_section(field.annotation)}
    about = [line.strip() for line in (section.__doc__ or "").strip().splitlines()]
    if several:
        about.append(f"At least one `[[{path}]]`. `{_variable(path)}`, a JSON list of tables, sets them all at once.")
    yield "\n".join(
        [
            f"## {path}",
            "",
            *about,
            "",
            f"| setting | type | default | {'' if several else 'environment | '}meaning |",
            "|---" * (4 if several else 5) + "|",
            *(_row(path, name, field, several) for name, field in section.model_fields.items() if name not in inner),
            "",
        ]
    )
    for name, field in inner.items():
        yield from _section(f"{path}.{name}", field.annotation)


def _row(path: str, name: str, field: FieldInfo, several: bool) -> str:
    kind = ", ".join([_type(field.annotation), *_bounds(field)])
    variable = [] if several else [f"`{_variable(path, name)}`"]
    cells = [f"`{name}`", kind, _default(field), *variable, field.description or ""]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _variable(*path: str) -> str:
    return ENV_PREFIX + "__".join(path).replace(".", "__").upper()


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type(annotation: Any) -> str:
    """A type in words: `whole number`, `"a", "b" or "c"`, `list of text`."""
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _either(f"`{toml_value(choice)}`" for choice in arguments)
    if origin in (Union, UnionType):
        return _either(_type(each) for each in arguments if each is not NoneType)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if origin is dict:
        return "table"
    raise TypeError(f"{annotation}: add the words for this type, as docs/settings.md shows them, to `_type`")


def _either(choices: Iterable[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def _bounds(field: FieldInfo) -> Iterator[str]:
    """The limits on a value besides its type."""
    for rule in field.metadata:
        for name, words in _BOUNDS.items():
            if hasattr(rule, name):
                yield words.format(f"{getattr(rule, name):,}")
        one, many = _LENGTHS[list if get_origin(field.annotation) is list else str]
        if (least := getattr(rule, "min_length", None)) is not None:
            yield f"at least {least} {one if least == 1 else many}"
        if (most := getattr(rule, "max_length", None)) is not None:
            yield f"at most {most} {one if most == 1 else many}"
        if pattern := getattr(rule, "pattern", None):
            yield f"matching `{pattern}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "unset" if value is None else f"`{toml_value(value)}`"


if __name__ == "__main__":
    main()
