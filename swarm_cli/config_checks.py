"""Checks of what a configuration names: an objective, installed packages and a folder, as the
services would take them.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

from shared.config import NodeConfig
from shared.registry import ENGINES, OBJECTIVES, POLICY_STORES, REGISTRIES, STRATEGIES
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.errors import CommandError


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
    from services.trainer.objectives.token_loss import trial_problem

    return trial_problem(configured)


def entry_problems(config: NodeConfig) -> list[str]:
    """Why a service would refuse a strategy, an engine or a policy store that the configuration
    chooses from an installed package. These are imported, but nothing is opened or started;
    built-in ones are not imported.
    """
    from services.sampler.strategies import strategy_named

    load = {STRATEGIES.kind: strategy_named, ENGINES.kind: ENGINES.load_function, POLICY_STORES.kind: POLICY_STORES.load_function}
    problems = []
    for _, kind, name in config.entries():
        if kind in load and name not in REGISTRIES[kind].built_in:
            try:
                load[kind](name)
            except ValueError as error:
                problems.append(str(error))
    return problems


def folder_problems(config: NodeConfig) -> list[str]:
    """Why the nodes' folders cannot be written; empty if they can. What is made to find out is
    removed.
    """
    var_dir = config.node.var_dir.absolute()
    nearest = next(folder for folder in (var_dir, *var_dir.parents) if folder.exists())
    try:
        with TemporaryDirectory(dir=nearest):
            return []
    except OSError as error:
        return [f"node.var_dir: {config.node.var_dir} cannot be written ({error.strerror}): set it to a folder that can be"]
