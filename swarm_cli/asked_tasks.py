"""The task sources that the command line names: datasets, files of rows, or the `[[tasks]]` of a
TOML file. Every mistake is told at once.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.config import ConfigError, TaskSpec, load_config
from shared.config.load import MAX_FILE_BYTES
from shared.hub_models import HUB
from shared.plain_files import read_named
from shared.registry import DEFAULT_VERIFIER, VERIFIERS
from shared.reward_files import BUILT_IN_REWARDS, Part, found_from, is_judged, reward_problems, verifier_words
from shared.runtime.exits import EXIT_CONFIG
from shared.text import error_text
from swarm_cli.chosen_config import chosen_file
from swarm_cli.errors import CommandError
from swarm_cli.task_probe import SMALLER, begin_deriving

NO_TASK, ALL_NAMES = "there is no such task", "`swarm task list` shows the names of all datasets"


def is_file(name: str) -> bool:
    """Return whether `name` is a file's: no dataset's has a dot or a slash."""
    return "." in name or "/" in name


def asked_sources(
    names: Sequence[str],
    verifier: str,
    columns: str,
    settings: str,
    reward: str = "",
    *,
    sandbox: bool = True,
    judge: tuple[str, str] | None = None,
) -> list[TaskSpec]:
    """The sources called `names`: datasets, and files, which are read here. A file's answers are
    scored by `exact` by default. columns: a file's, `question,answer`; empty: those that the chosen
    configuration names for it, else the usual. settings:
    a dataset's, as JSON. reward: instead of a verifier, a function in a file. sandbox: as in
    `[[tasks]]`. judge: its address and model.

    Raises:
        CommandError: with a line for each mistake, and code 78 if the reward cannot be used. A
            dataset's name and settings are tried only if something else is wrong, as they are tried
            in the sandbox anyway.
    """
    with_files = any(map(is_file, names))
    problems = list(_wrong_words(verifier, columns if with_files else "", settings))
    unusable: list[str] = []
    if reward:
        if verifier != DEFAULT_VERIFIER:
            problems.append("--reward and --verifier are both given: keep one")
        reward = found_from(reward, Path.cwd())
        unusable = [*reward_problems(reward)] if Part(reward).file else [f"--reward {reward}: write FILE.py:FUNCTION"]
        problems += unusable
    if not sandbox and not reward and verifier in VERIFIERS.built_in:
        problems.append("--no-sandbox is for a reward of your own: give it with --reward")
        sandbox = True
    if is_judged(reward or verifier) != (judge is not None):
        asks = "asks no judge: omit --judge" if judge else "asks a judge: name its server and model, --judge URL MODEL"
        problems.append(f"{verifier_words(reward or verifier)} {asks}")
    sources: list[TaskSpec] = []
    scored: dict[str, Any] = {"reward": reward} if Part(reward).file else {"verifier": verifier}
    scored |= {"sandbox": sandbox, "judge": {"url": judge[0], "model": judge[1]} if judge else {}}
    for name in names:
        try:
            sources.append(_file(name, scored, columns) if is_file(name) else TaskSpec(dataset=name))
        except ValidationError as error:
            problems += [f"{NO_TASK} ({each['msg']}): {ALL_NAMES}" for each in error.errors()]
        except ValueError as error:
            problems += str(error).splitlines()
    if problems:
        told = "\n".join(dict.fromkeys([*problems, *_underivable(sources, settings)]))
        raise CommandError(told, EXIT_CONFIG if unusable else 1)
    return [source if source.source == "file" else TaskSpec(dataset=source.dataset, **scored) for source in sources]


def canonical_settings(text: str) -> str:
    """A dataset's settings as they are sent in a task reference. Raises ValueError."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--settings is not JSON ({error}): write it like '{{\"max_terms\": 3}}'") from None
    if not isinstance(settings, dict):
        raise ValueError("--settings must be a JSON object, like '{\"max_terms\": 3}'")
    return json.dumps(settings, sort_keys=True, separators=(",", ":"))


def _wrong_words(verifier: str, columns: str, settings: str) -> Iterator[str]:
    if columns and not all(_columns(columns)):
        yield f"--columns {columns}: give two names, such as problem,solution"
    checks: list[Callable[[], str]] = [partial(VERIFIERS.check, verifier, BUILT_IN_REWARDS), partial(canonical_settings, settings)]
    for check in checks:
        try:
            check()
        except ValueError as error:
            yield str(error)


def _columns(columns: str) -> tuple[str, str]:
    question, _, answer = columns.rpartition(",")
    return question, answer


def _file(path: str, scored: dict[str, Any], columns: str) -> TaskSpec:
    """Raises ValueError with a line for each mistake of the file; if columns or verifier are wrong,
    with none that they may have caused.
    """
    from shared.tasks.file_source import with_row_name
    from shared.tasks.hub_files import source_files

    revision = ""
    if path.startswith(HUB):
        path, _, revision = path.partition("@")
    question, answer = _columns(columns)
    if columns and not (question and answer):
        source_files(path, revision)
        return TaskSpec(source="file", path=path, revision=revision)
    if not columns:
        question, answer = _configured_columns(path)
    known = (*VERIFIERS.names(), *BUILT_IN_REWARDS)
    if scored.get("verifier") == DEFAULT_VERIFIER or scored.get("verifier", "exact") not in known:
        scored = {**scored, "verifier": "exact"}
    return with_row_name(TaskSpec(source="file", path=path, revision=revision, question=question, answer=answer, **scored))


def _configured_columns(path: str) -> tuple[str, str]:
    """The columns of the question and the answer that the chosen configuration names for a file;
    empty if it does not name the file, or is itself broken.
    """
    try:
        tables = tomllib.loads(read_named(chosen_file(None), MAX_FILE_BYTES).decode("utf-8-sig")).get("tasks")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError, ValueError):
        return "", ""
    for table in tables if isinstance(tables, list) else []:
        named = table.get("path") if isinstance(table, dict) else None
        if isinstance(named, str) and (named == path or os.path.realpath(named) == os.path.realpath(path)):
            return str(table.get("question", "")), str(table.get("answer", ""))
    return "", ""


def _underivable(sources: Sequence[TaskSpec], settings: str) -> list[str]:
    try:
        config: dict[str, Any] = json.loads(canonical_settings(settings))
    except ValueError:
        config = {}
    try:
        asked = [TaskSpec(dataset=source.dataset, config=config) for source in sources if source.source != "file"]
    except ValidationError as error:  # of the settings
        return [str(each["ctx"]["error"]) if "error" in each.get("ctx", {}) else each["msg"] for each in error.errors()]
    lines = begin_deriving(asked, 0, SMALLER)().problems if asked else []
    return [line.partition("]] ")[2].partition(": ")[2] if line.startswith("[[") else line for line in lines]


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
        raise CommandError(f"--tasks {path}: cannot be read ({error_text(error)}): correct the path or the file") from None
    if not tables:
        raise CommandError(f"--tasks {path}: the file has no [[tasks]]: add one with a `dataset`")
    return tables


def _usable(tables: object, where: str) -> list[TaskSpec]:
    try:
        return load_config(overrides={"tasks": tables}, environment={}).tasks
    except ConfigError as error:
        raise CommandError("\n".join([f"{where}: cannot be used:", *(f"  {line}" for line in error.faults)])) from None
