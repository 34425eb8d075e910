"""Task sources given on the command line: a TOML file's `[[tasks]]`, or names of datasets with
their default settings.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError

from shared.config import TaskSpec
from shared.os_words import in_words
from shared.setting_names import setting_name, task_entry
from swarm_cli.errors import CommandError


def task_sources(text: str) -> list[TaskSpec]:
    """Sources from `text`: the name of a file, if that file exists or the name ends in .toml, else
    dataset names separated by commas.

    Raises:
        CommandError: the file has no usable `[[tasks]]`, or a name is not valid for a dataset.
    """
    path = Path(text)
    if path.is_file() or path.suffix == ".toml":
        return _from_file(path)
    return [_source({"dataset": name.strip()}, f"--tasks {text}") for name in text.split(",") if name.strip()]


def _from_file(path: Path) -> list[TaskSpec]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("tasks", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"--tasks {path}: cannot be read ({in_words(error)}): correct the path or the file") from None
    if not tables:
        raise CommandError(f"--tasks {path}: the file has no [[tasks]]: add one with a `dataset`")
    return [_source(table, f"--tasks {path}: {task_entry(place)}") for place, table in enumerate(tables)]


def _source(table: object, where: str) -> TaskSpec:
    try:
        return TaskSpec.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        named = f"{where}: {setting_name(first['loc'])}" if first["loc"] else where
        raise CommandError(f"{named}: {first['msg'].removeprefix('Value error, ')}") from None
