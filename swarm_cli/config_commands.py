"""`swarm config show` and `swarm config check`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from shared.config import ConfigError, NodeConfig
from shared.config.basic import BASIC
from shared.ignored_entries import ignored_entries
from shared.runtime.errors import EXIT_CONFIG
from shared.runtime.otel import tracing_problems
from shared.setting_names import told
from swarm_cli.checkable import Checkable
from swarm_cli.chosen_config import ConfigOption, entry_problems, load_chosen, objective_problem, sources
from swarm_cli.console import count, say
from swarm_cli.errors import CommandError
from swarm_cli.few_rows import soon_used_up
from swarm_cli.key_files import key_file_problems
from swarm_cli.local.base_model import TOY_POLICY, toy_problem, toy_to_be_built
from swarm_cli.model.facts import read_facts
from swarm_cli.reachable import unreachable
from swarm_cli.ruinous import ruinous_settings, ruinous_with_model, sent_key
from swarm_cli.tasks_apart import SMALLER, begin_deriving
from swarm_cli.toml_view import config_toml, left_out
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
            "" if everything else f"\n# and {left_out(chosen, BASIC)} settings that most users leave unchanged: --all prints them"
        )
        typer.echo(f"# {sources(config)}{rest}\n{config_toml(chosen, None if everything else BASIC)}", nl=False)


@config_app.command()
def check(
    config: ConfigOption = None,
    connect: Annotated[bool, typer.Option("--connect", help="Also check that the servers answer and the ports are free.")] = False,
) -> None:
    """Check the values, derive one task from each source, try its reward in the sandbox, and look
    for the model and the key files.
    Notes name settings without effect, warnings name settings likely to ruin the run. Mistakes
    are reported together, apart from those that can be seen only once another is mended.
    """
    faults = None
    try:
        node_config = load_chosen(config)
    except ConfigError as error:
        if error.rest is None:
            raise
        faults, node_config = error, error.rest
    left = Checkable(node_config, faults.removed, faults.task_places) if faults else Checkable(node_config)
    toy = toy_to_be_built(node_config)
    # Two processes work while this one does the rest; the model's takes the longest.
    model_facts = read_facts(node_config.model) if left.model and not toy else None
    specs, places, held_out = left.tasks
    # Files are read and a task is derived, as some of reasoning-gym's settings fail only then.
    tasks = begin_deriving(specs, held_out, SMALLER, places)
    objective = objective_problem(node_config) if left.knows("trainer", "objective") else ""
    untaught = toy_problem(node_config) if left.model and left.knows("tasks") else None
    elsewhere = [
        *([untaught] if untaught else []),
        *entry_problems(node_config),
        *key_file_problems(left.key_files),
        *tracker_problems(node_config),
        *tracing_problems(node_config, os.environ),
    ]
    underivable = tasks.problems()
    problems = [*([objective] if objective else []), *([told(underivable)] if underivable else []), *elsewhere]
    warnings = [
        *ignored_entries(node_config),
        *ruinous_settings(node_config),
        *soon_used_up(node_config, tasks.files),
        *tasks.reward_warnings,
    ]
    if model_facts:
        facts = model_facts()
        problems += facts.problems
        if not problems:
            warnings += ruinous_with_model(node_config, facts.context_tokens, facts.has_chat_template)
    if connect:
        problems += left.not_of_defaults(asyncio.run(unreachable(node_config)))
    if faults is None:  # with a fault they would describe defaults instead of the file's values
        _advise(node_config, warnings, toy and not untaught)
    elif not problems:
        raise faults
    if problems:
        heading = "the configuration cannot be used:" if faults is None else str(faults)
        raise CommandError("\n".join([heading, *problems]), EXIT_CONFIG)
    for line in tasks.rewards:
        say(f"reward: {line}")
    beside = f", {count(len(warnings), 'warning')}" if warnings else ""
    say(f"OK: {count(len(node_config.tasks), 'task source')}, model {node_config.model.path}{beside}")


def _advise(config: NodeConfig, warnings: Sequence[str], toy: bool) -> None:
    sent = sent_key(config)
    for sentence in [*settings_without_effect(config), *([sent] if sent else [])]:
        say(f"note: {sentence}")
    if toy:
        say(f"note: {TOY_POLICY} does not exist yet: `swarm up` builds it when it first starts; `swarm model init` builds it now")
    for sentence in warnings:
        say(f"warning: {sentence}")


def tracker_problems(config: NodeConfig) -> list[str]:
    """A sentence for each tracker whose package is missing, as the trainer would report it."""
    from services.trainer.tracking.extras import tracking_problems

    return tracking_problems(config)
