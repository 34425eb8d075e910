"""The `swarm` program: its commands, and how it reports their failures."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from shared.config import ConfigError
from shared.runtime.errors import EXIT_CONFIG
from shared.transport.base import TransportError
from swarm_cli.ban_commands import ban, unban
from swarm_cli.config_commands import config_app
from swarm_cli.console import log_to_standard_error, note
from swarm_cli.dashboard.command import dashboard
from swarm_cli.dlq_commands import dlq_app
from swarm_cli.errors import CommandError
from swarm_cli.experiment.commands import experiment_app
from swarm_cli.key_commands import keys_app, roster_app
from swarm_cli.local.up import up
from swarm_cli.model.commands import model_app
from swarm_cli.model.evaluate import evaluate
from swarm_cli.nats.commands import nats_app
from swarm_cli.observe.plot import plot
from swarm_cli.observe.status import status
from swarm_cli.observe.top import top
from swarm_cli.observe.watch import watch
from swarm_cli.rollouts.command import rollouts
from swarm_cli.task_commands import task_app

app = typer.Typer(
    rich_markup_mode="markdown",  # the default reads "[default: ...]" as a style and swallows it
    name="swarm",
    help="Nodes that post-train language models by reinforcement learning and share the answers they sampled.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(up)
app.command()(watch)
app.command()(status)
app.command()(top)
app.command()(dashboard)
app.command()(plot)
app.command(name="eval")(evaluate)
app.command()(rollouts)
app.command()(ban)
app.command()(unban)
app.add_typer(config_app)
app.add_typer(dlq_app)
app.add_typer(experiment_app)
app.add_typer(keys_app)
app.add_typer(roster_app)
app.add_typer(model_app)
app.add_typer(nats_app)
app.add_typer(task_app)

_DERIVING_COMMANDS = {"config", "eval", "experiment", "task"}


def main() -> NoReturn:
    """Run a command. Report a failure as a sentence on standard error and an exit code, not as a
    traceback.
    """
    if sys.argv[1:2] and sys.argv[1] in _DERIVING_COMMANDS:
        _fix_hash_seed()
    log_to_standard_error()
    try:
        app()
    except ConfigError as error:
        note(f"swarm: {error}")
        sys.exit(EXIT_CONFIG)
    except CommandError as error:
        note(f"swarm: {error}")
        sys.exit(error.exit_code)
    except TransportError as error:
        note(f"swarm: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _fix_hash_seed() -> None:
    """Restart this process with hash seed 0, so that every dataset derives the same tasks as in the
    services.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
