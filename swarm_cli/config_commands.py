"""`swarm config show` and `swarm config check`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig, load_config
from shared.config.environment import CONFIG_FILE_VARIABLE, setting_variables
from shared.config.sections import ModelSection
from shared.config.without_effect import settings_without_effect
from shared.runtime.errors import EXIT_CONFIG
from swarm_cli.errors import CommandError
from swarm_cli.local.base_model import model_problem
from swarm_cli.toml_view import config_toml

config_app = typer.Typer(name="config", help="Show or check a node's configuration.", no_args_is_help=True)
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Configuration file.  [default: SWARM_CONFIG or config/demo.toml]")
]

DEFAULT_FILE = Path("config/demo.toml")


def load_chosen(config: Path | None) -> NodeConfig:
    """The configuration that was named, or else SWARM_CONFIG's, or else the demo's."""
    return load_config(config if config or os.environ.get(CONFIG_FILE_VARIABLE) else DEFAULT_FILE)


@config_app.command()
def show(
    config: ConfigOption = None, defaults: Annotated[bool, typer.Option("--defaults", help="The defaults alone.")] = False
) -> None:
    """Print every value, with what it means and its default where that is another, as TOML."""
    if defaults and config:
        raise CommandError("--defaults reads no file: leave --config out")
    if defaults:
        typer.echo(f"# the defaults\n{config_toml(NodeConfig.model_construct())}", nl=False)
    else:
        typer.echo(f"# {sources(config)}\n{config_toml(load_chosen(config))}", nl=False)


def sources(config: Path | None) -> str:
    """Where the values of `load_chosen` come from."""
    file = config or os.environ.get(CONFIG_FILE_VARIABLE) or DEFAULT_FILE
    return " over ".join([*filter(None, [", ".join(setting_variables(os.environ))]), str(file), "the defaults"])


@config_app.command()
def check(config: ConfigOption = None) -> None:
    """Check the values, make one task of each source, and look for the model. Notes say which settings have no effect."""
    node_config = load_chosen(config)
    for sentence in settings_without_effect(node_config):
        typer.echo(f"note: {sentence}")
    problems = task_problems(node_config) + model_problems(node_config.model)
    if problems:
        raise CommandError("the configuration cannot be used:\n" + "\n".join(problems), EXIT_CONFIG)
    typer.echo(f"OK: {len(node_config.tasks)} task sources, model {node_config.model.path}")


def task_problems(config: NodeConfig) -> list[str]:
    """Make one task of each source; some of reasoning-gym's settings fail only then."""
    from shared.tasks.derive import TaskError
    from shared.tasks.specs import check_specs

    try:
        check_specs(config.tasks)
    except TaskError as error:
        return [str(error)]
    return []


def model_problems(model: ModelSection) -> list[str]:
    """Read the model's config and tokenizer, of a hub name through the hub or its cache; not the weights."""
    problem = model_problem(model.path, model.revision)
    if problem:
        return [problem]
    from shared.model.loading import ModelLoadError, load_tokenizer, model_max_length

    try:
        model_max_length(model)
        load_tokenizer(model)
    except ModelLoadError as error:
        return [str(error)]
    return []
