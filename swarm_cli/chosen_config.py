"""The configuration that a command uses: the file given by --config, else SWARM_CONFIG's, else the
demo's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig, load_config
from shared.config.environment import CONFIG_FILE_VARIABLE, setting_variables
from shared.ignored_entries import chosen_entries
from shared.registry import ENGINES, OBJECTIVES, POLICY_STORES, STRATEGIES
from shared.runtime.errors import EXIT_CONFIG
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.shipped import DEMO_CONFIG, shown

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file.  [default: SWARM_CONFIG or the demo's]")]
NodeUrlOption = Annotated[str, typer.Option(help="Server of the nodes' streams.  [default: the running run's, or nats.node_url]")]
SwarmUrlOption = Annotated[
    str, typer.Option(help="Server of the swarm's streams, or none.  [default: the same run's, or nats.swarm_url]")
]
"""Read by `swarm_cli.running.servers`."""


def load_chosen(config: Path | None) -> NodeConfig:
    """The configuration in the file given, else in SWARM_CONFIG's, else in the demo's."""
    return load_config(config if config or os.environ.get(CONFIG_FILE_VARIABLE) else DEMO_CONFIG)


def for_node(config: NodeConfig, node: str) -> NodeConfig:
    """The configuration with `node.id` set to `node`; unchanged if `node` is empty. Raises
    CommandError if the name is not valid.
    """
    return config.model_copy(update={"node": config.node.model_copy(update={"id": checked_node(node)})}) if node else config


def sources(config: Path | None) -> str:
    """The sources of `load_chosen`'s values, the strongest first."""
    file = config or os.environ.get(CONFIG_FILE_VARIABLE) or shown(DEMO_CONFIG)
    return " over ".join([*filter(None, [", ".join(setting_variables(os.environ))]), str(file), "the defaults"])


def check_objective(config: NodeConfig) -> None:
    """Refuse an objective that the other settings do not allow, as the trainer would. Does not
    import torch itself, so that trying it is left to the trainer.
    """
    if problem := objective_problem(config, tried=False):
        raise CommandError(f"the configuration cannot be used:\n{problem}", EXIT_CONFIG)


def objective_problem(config: NodeConfig, *, tried: bool = True) -> str:
    """Why the trainer would refuse its objective; empty if it would not. tried: try the loss and
    the advantages of an installed one, for which torch is imported.
    """
    from services.trainer.objectives.config import configured_objective

    try:
        configured = configured_objective(config)
    except (ValueError, TypeError) as error:
        return str(error)
    if not tried or configured.name in OBJECTIVES.built_in:
        return ""
    from services.trainer.objectives.trial import trial_problem

    return trial_problem(configured)


def entry_problems(config: NodeConfig) -> list[str]:
    """Why a service would refuse a strategy, an engine or a policy store that the configuration
    chooses from an installed package. These are imported, but nothing is opened or started;
    built-in ones are not imported.
    """
    from services.sampler.strategies import strategy_named

    load = {STRATEGIES.kind: strategy_named, ENGINES.kind: ENGINES.load_function, POLICY_STORES.kind: POLICY_STORES.load_function}
    problems = []
    for _, registry, name in chosen_entries(config):
        if registry.kind in load and name not in registry.built_in:
            try:
                load[registry.kind](name)
            except ValueError as error:
                problems.append(str(error))
    return problems
