"""A configuration as TOML with each field's description: `swarm config show` prints it and
`load_config` can read it back.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared.config import NodeConfig

BASIC = frozenset(
    {
        *("node.id", "node.seed", "node.var_dir"),
        *("nats.node_url", "nats.swarm_url", "nats.swarm_id"),
        *("model.path", "model.revision", "model.device", "model.system_prompt"),
        *("generator.engine", "generator.completions", "generator.max_new_tokens"),
        *("eval.tasks", "eval.every_versions"),
        *("verifier.share", "verifier.trust"),
        *("sampler.local", "sampler.external", "sampler.strategy"),
        *("trainer.objective", "trainer.learning_rate", "trainer.token_budget", "trainer.max_steps", "trainer.lora.rank"),
        *("http.base_port",),
    }
)
"""As `section.key`. `swarm config show` prints these and every setting that differs from its
default; with `--all` it prints everything.
"""


def config_toml(config: NodeConfig, only: Container[str] | None = None) -> str:
    """Render the values. Comments hold the settings that are not set, and the defaults of those
    that differ from them.

    only: settings to show, as `section.key`; others are shown if they differ from their default.
    None: show all.
    """
    return "\n".join(_sections(config, (), only)).lstrip() + "\n"


def left_out(section: BaseModel, only: Container[str], path: tuple[str, ...] = ()) -> int:
    """The number of settings that `config_toml` does not show."""
    count = 0
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            count += left_out(value, only, (*path, name))
        elif path and ".".join((*path, name)) not in only and not _default(field, value):
            count += 1
    return count


def _sections(section: BaseModel, path: tuple[str, ...], only: Container[str] | None) -> Iterator[str]:
    """A section's own keys come before its tables, because TOML assigns every key after a `[table]`
    line to that table. A section without lines has no heading.
    """
    nested: list[tuple[str, Any]] = []
    lines: list[str] = []
    fields = section.sections() if isinstance(section, NodeConfig) else type(section).model_fields
    for name, field in fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel) or (isinstance(value, list) and value and isinstance(value[0], BaseModel)):
            nested.append((name, value))
        elif only is None or ".".join((*path, name)) in only or _default(field, value):
            lines += _field(name, field, value)
    if path and lines:
        yield ""
        yield from (f"# {line}" for line in (type(section).__doc__ or "").strip().splitlines())
        yield f"[{'.'.join(path)}]"
    yield from lines
    for name, value in nested:
        if isinstance(value, BaseModel):
            yield from _sections(value, (*path, name), only)
        else:
            yield from _tables(".".join((*path, name)), value)


def _tables(name: str, entries: list[BaseModel]) -> Iterator[str]:
    for entry in entries:
        yield ""
        yield f"[[{name}]]"
        for key, field in type(entry).model_fields.items():
            if key == "verifier" and any(getattr(entry, instead) for instead in ("reward", "rewards", "environment")):
                continue  # it is derived from what is given instead
            yield from _field(key, field, getattr(entry, key))


def _field(name: str, field: FieldInfo, value: Any) -> Iterator[str]:
    explained = [part for part in (field.description or "", _choices(field.annotation), _default(field, value)) if part]
    if explained:
        yield f"# {' '.join(explained)}"
    if value is None:
        yield f'{name} = "none"' if name == "swarm_url" else f"# {name} is not set"
    else:
        yield f"{name} = {toml_value(value)}"


def _default(field: FieldInfo, value: Any) -> str:
    """The default, if the value differs from it."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or value == default:
        return ""
    return f"(default: {'not set' if default is None else toml_value(default)})"


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f"One of {', '.join(str(choice) for choice in get_args(annotation))}."
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        texts = [text for part in parts if (text := _choices(part))]
        return texts[0] if len(texts) == len(parts) else ""  # a list too, say, which the description tells
    return ""


def toml_value(value: Any) -> str:
    """A value in TOML's notation, dictionaries and sections inline."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Path | str):
        return _quoted(str(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_quoted(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {pairs} }}" if pairs else "{}"
    return repr(value)


def _quoted(text: str) -> str:
    """As JSON writes it, with the one control character escaped that only TOML forbids."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
