"""Refuses a misspelt dataset before anything starts. The services would refuse it too, but only
after they have loaded, half a minute later.

The names are read from reasoning-gym's source, because importing it takes seconds on a busy
machine and stays in the memory of `swarm up`.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from shared.config import NodeConfig
from shared.registry import TASK_SOURCES
from shared.runtime.errors import EXIT_CONFIG
from shared.suggestion import did_you_mean
from swarm_cli.errors import CommandError

_REGISTERED = re.compile(r'^register_dataset\(\s*(\w+|"\w+"),', re.MULTILINE)
_CONSTANT = re.compile(r'^(\w+) = "(\w+)"$', re.MULTILINE)


def check_datasets(config: NodeConfig) -> None:
    """Raises CommandError: a task source names a dataset that does not exist."""
    known = known_datasets()
    wrong = [spec.dataset for spec in config.tasks if spec.source != "file" and spec.dataset not in known]
    if known and wrong:
        lines = [f"  [[tasks]] dataset {name!r}: unknown; {did_you_mean(name, known) or 'see `swarm task list`'}" for name in wrong]
        raise CommandError("task sources cannot be used, so nothing was started:\n" + "\n".join(lines), EXIT_CONFIG)


def known_datasets() -> set[str]:
    """Names of reasoning-gym's datasets and of installed task sources; empty if reasoning-gym
    cannot be found.
    """
    spec = importlib.util.find_spec("reasoning_gym")
    folders = (spec.submodule_search_locations or []) if spec else []
    names = {name for folder in folders for file in Path(folder).rglob("*.py") for name in _registered(file.read_text())}
    return names | set(TASK_SOURCES.names()) if names else set()


def _registered(source: str) -> list[str]:
    """The datasets registered in a module; nearly all give their name as a constant
    defined above.
    """
    constants = dict(_CONSTANT.findall(source))
    found = [name.strip('"') if name.startswith('"') else constants.get(name) for name in _REGISTERED.findall(source)]
    return [name for name in found if name is not None]
