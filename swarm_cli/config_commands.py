"""`swarm config show` and `swarm config check`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from pydantic import BaseModel

from shared.config import NodeConfig, TaskSpec
from shared.config.basic import BASIC
from shared.config.sections import ModelSection
from shared.runtime.errors import EXIT_CONFIG
from shared.runtime.otel import tracing_problems
from swarm_cli.chosen_config import ConfigOption, check_objective, load_chosen, sources
from swarm_cli.console import say
from swarm_cli.errors import CommandError
from swarm_cli.key_files import key_file_problems
from swarm_cli.local.base_model import TOY_POLICY, model_problem, toy_to_be_built
from swarm_cli.reachable import unreachable
from swarm_cli.ruinous import ruinous_settings, ruinous_with_model
from swarm_cli.toml_view import config_toml
from swarm_cli.without_effect import settings_without_effect

config_app = typer.Typer(name="config", help="Show or check a node's configuration.", no_args_is_help=True)


@config_app.command()
def show(
    config: ConfigOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Every setting, not only basic and changed ones.")] = False,
    defaults: Annotated[bool, typer.Option("--defaults", help="Only the defaults, of every setting.")] = False,
) -> None:
    """Print the basic settings and those that differ from their default, with their descriptions,
    as TOML.
    """
    if defaults and config:
        raise CommandError("--defaults reads no file: omit --config")
    if defaults:
        typer.echo(f"# the defaults\n{config_toml(NodeConfig.model_construct())}", nl=False)
    else:
        chosen = load_chosen(config)
        rest = (
            ""
            if everything
            else f"\n# and {settings_count() - len(BASIC)} settings that most users leave unchanged: --all prints them"
        )
        typer.echo(f"# {sources(config)}{rest}\n{config_toml(chosen, None if everything else BASIC)}", nl=False)


def settings_count() -> int:
    """The number of settings, not counting those of a `[[tasks]]` entry."""
    return sum(1 for _ in _keys(NodeConfig))


def _keys(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation)
        elif name != "tasks":
            yield name


@config_app.command()
def check(
    config: ConfigOption = None,
    connect: Annotated[bool, typer.Option("--connect", help="Try its servers and ports too.")] = False,
) -> None:
    """Check the values, make one task of each source, look for the model and the key files. Notes
    say which settings have no effect, warnings which are likely to ruin the run.
    """
    node_config = load_chosen(config)
    check_objective(node_config)
    for sentence in settings_without_effect(node_config):
        say(f"note: {sentence}")
    toy = toy_to_be_built(node_config)
    if toy:
        say(f"note: {TOY_POLICY} is not there yet: `swarm up` builds it at its first start, `swarm model init` now")
    problems = [
        *task_problems(node_config.tasks, node_config.eval.tasks),
        *key_file_problems(node_config),
        *tracker_problems(node_config),
        *tracing_problems(node_config, os.environ),
        *([] if toy else model_problems(node_config.model)),
    ]
    warnings = ruinous_settings(node_config)
    if not toy and not problems:
        warnings += ruinous_with_model(node_config, *facts_of(node_config.model))
    for sentence in warnings:
        say(f"warning: {sentence}")
    if connect:
        problems += asyncio.run(unreachable(node_config))
    if problems:
        raise CommandError("the configuration cannot be used:\n" + "\n".join(problems), EXIT_CONFIG)
    beside = f", {len(warnings)} {'warning' if len(warnings) == 1 else 'warnings'}" if warnings else ""
    say(f"OK: {len(node_config.tasks)} task sources, model {node_config.model.path}{beside}")


def tracker_problems(config: NodeConfig) -> list[str]:
    """A sentence for each tracker whose package is missing, as the trainer would say."""
    from services.trainer.tracking.extras import tracking_problems

    return tracking_problems(config)


def facts_of(model: ModelSection) -> tuple[int, bool]:
    """The model's context in tokens, and whether its tokenizer has a chat template."""
    from shared.model.loading import load_tokenizer, model_max_length

    return model_max_length(model), bool(load_tokenizer(model).chat_template)


def task_problems(tasks: Sequence[TaskSpec], held_out: int) -> list[str]:
    """Read files and derive one task of each source, because some of reasoning-gym's settings fail
    only then. `held_out`: `eval.tasks`.
    """
    from shared.tasks.derive import TaskError
    from shared.tasks.file_source import with_rows
    from shared.tasks.specs import check_specs

    try:
        check_specs(with_rows(tasks), held_out)
    except TaskError as error:
        return [str(error)]
    return []


def model_problems(model: ModelSection) -> list[str]:
    """Read the model's config and tokenizer (for a hub name, from the hub or its cache), but not
    the weights.
    """
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
