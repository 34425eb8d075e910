"""The configuration that a command uses: the file given by --config, else SWARM_CONFIG's, else
`node.toml` in the current folder, else the demo's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from shared.config.load import CONFIG_FILE_VARIABLE, load, setting_variables
from shared.config.node_sections import ProcessConfig
from swarm_cli.errors import checked_node
from swarm_cli.installation import DEMO_CONFIG, PROJECT_FILE, shown

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Configuration file.  [default: SWARM_CONFIG, ./node.toml or the demo's]")
]
NodeUrlOption = Annotated[str, typer.Option(help="Server of the nodes' streams.  [default: the running run's, or nats.node_url]")]
SwarmUrlOption = Annotated[
    str, typer.Option(help="Server of the swarm's streams, or none.  [default: the same run's, or nats.swarm_url]")
]


C = TypeVar("C", bound=ProcessConfig)


def load_chosen(config: Path | None, kind: type[C]) -> C:
    """The configuration in the file given, else in SWARM_CONFIG's, else in the default one. kind:
    what is read and checked of it.
    """
    return load(kind, chosen_file(config))


def chosen_file(config: Path | None) -> Path:
    """The file given, else SWARM_CONFIG's, else the default one."""
    named = os.environ.get(CONFIG_FILE_VARIABLE)
    return config or (Path(named) if named else default_file())


def default_file() -> Path:
    """`node.toml` in the current folder, which `swarm new` writes, else the demo's."""
    project = Path(PROJECT_FILE)
    return project if project.is_file() else DEMO_CONFIG


def for_node(config: C, node: str) -> C:
    """The configuration with `node.id` set to `node`; unchanged if `node` is empty. Raises
    CommandError if the name is not valid.
    """
    return config.model_copy(update={"node": config.node.model_copy(update={"id": checked_node(node)})}) if node else config


def sources(config: Path | None) -> str:
    """The sources of `load_chosen`'s values, the strongest first."""
    file = config or os.environ.get(CONFIG_FILE_VARIABLE) or shown(default_file())
    return " over ".join([*filter(None, [", ".join(setting_variables(os.environ))]), str(file), "the defaults"])


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
