"""Task sources given on the command line: a TOML file's `[[tasks]]`, or names of datasets with
their default settings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from shared.config import ConfigError, TaskSpec, load_config
from shared.config.load import MAX_FILE_BYTES
from shared.os_words import in_words
from shared.plain_files import read_named
from swarm_cli.checkable import Checkable
from swarm_cli.errors import CommandError
from swarm_cli.tasks_apart import SMALLER, problems_within


def task_sources(text: str) -> list[TaskSpec]:
    """Sources from `text`: the name of a file, if that file exists, or the name ends in .toml or
    has a slash, else dataset names separated by commas.

    Raises:
        CommandError: the file has no usable `[[tasks]]`, or a name is not valid for a dataset. It
            tells of every mistake, as `swarm config check` does.
    """
    path = Path(text)
    if path.suffix == ".toml" or "/" in text or path.exists():
        return _usable(_from_file(path), f"--tasks {path}")
    names = [name.strip() for name in text.split(",") if name.strip()]
    return _usable([{"dataset": name} for name in names], f"--tasks {text}")


def _from_file(path: Path) -> object:
    try:
        tables = tomllib.loads(read_named(path, MAX_FILE_BYTES).decode()).get("tasks", [])
    except RecursionError:
        raise CommandError(f"--tasks {path}: cannot be read (nested too deep): correct the file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"--tasks {path}: cannot be read ({in_words(error)}): correct the path or the file") from None
    if not tables:
        raise CommandError(f"--tasks {path}: the file has no [[tasks]]: add one with a `dataset`")
    return tables


def _usable(tables: object, where: str) -> list[TaskSpec]:
    try:
        return load_config(overrides={"tasks": tables}, environment={}).tasks
    except ConfigError as error:
        lines = [*error.faults, *_further(error)]
        raise CommandError("\n".join([f"{where}: cannot be used:", *(f"  {line}" for line in lines)])) from None


def _further(error: ConfigError) -> Iterator[str]:
    """What deriving a task from each of the other sources finds."""
    if error.rest is not None:
        tasks, places, held_out = Checkable(error.rest, error.removed, error.task_places).tasks
        yield from problems_within(tasks, held_out, SMALLER, places)
