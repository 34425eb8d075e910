"""The configuration that a command uses: the file given by --config, else SWARM_CONFIG's, else
`node.toml` in the current folder, else the demo's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig, load_config
from shared.config.load import CONFIG_FILE_VARIABLE, setting_variables
from swarm_cli.errors import checked_node
from swarm_cli.installation import DEMO_CONFIG, PROJECT_FILE, shown

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Configuration file.  [default: SWARM_CONFIG, ./node.toml or the demo's]")
]
NodeUrlOption = Annotated[str, typer.Option(help="Server of the nodes' streams.  [default: the running run's, or nats.node_url]")]
SwarmUrlOption = Annotated[
    str, typer.Option(help="Server of the swarm's streams, or none.  [default: the same run's, or nats.swarm_url]")
]
"""Read by `swarm_cli.runs.servers`."""


def load_chosen(config: Path | None) -> NodeConfig:
    """The configuration in the file given, else in SWARM_CONFIG's, else in the default one."""
    return load_config(config if config or os.environ.get(CONFIG_FILE_VARIABLE) else default_file())


def default_file() -> Path:
    """`node.toml` in the current folder, which `swarm new` writes, else the demo's."""
    project = Path(PROJECT_FILE)
    return project if project.is_file() else DEMO_CONFIG


def for_node(config: NodeConfig, node: str) -> NodeConfig:
    """The configuration with `node.id` set to `node`; unchanged if `node` is empty. Raises
    CommandError if the name is not valid.
    """
    return config.model_copy(update={"node": config.node.model_copy(update={"id": checked_node(node)})}) if node else config


def sources(config: Path | None) -> str:
    """The sources of `load_chosen`'s values, the strongest first."""
    file = config or os.environ.get(CONFIG_FILE_VARIABLE) or shown(default_file())
    return " over ".join([*filter(None, [", ".join(setting_variables(os.environ))]), str(file), "the defaults"])


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
