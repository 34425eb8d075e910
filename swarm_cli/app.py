"""The `swarm` program: its commands, and how their failures are reported.

A command's module is imported only when that command runs; `swarm --help` imports all of them. The
imports of one command (NATS, numpy, rich tables) take a second that the others need not spend.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer

FIRST, HERE, OTHERS, OPERATION = "Train a model of your own", "On this machine", "With others", "Look closer and operate"
COMMANDS = {
    FIRST: {
        "new": "swarm_cli.new:new",
        "up": "swarm_cli.local.up:up",
        "dashboard": "swarm_cli.dashboard.command:dashboard",
        "rollouts": "swarm_cli.rollouts.command:rollouts",
        "eval": "swarm_cli.model.evaluate:evaluate",
    },
    HERE: {
        "status": "swarm_cli.observe.status:status",
        "top": "swarm_cli.observe.top:top",
        "plot": "swarm_cli.observe.plot:plot",
        "down": "swarm_cli.local.control:down",
        "restart": "swarm_cli.local.control:restart",
        "progress": "swarm_cli.observe.progress:progress",
    },
    OTHERS: {
        "invite": "swarm_cli.invite_command:invite",
        "join": "swarm_cli.join.command:join",
        "answer": "swarm_cli.answer:answer",
        "ban": "swarm_cli.node_commands:ban",
        "unban": "swarm_cli.node_commands:unban",
    },
}
GROUPS = {
    FIRST: {"model": "swarm_cli.model.commands:model_app"},
    HERE: {"config": "swarm_cli.config_commands:config_app", "task": "swarm_cli.task_commands:task_app"},
    OTHERS: {"keys": "swarm_cli.key_commands:keys_app", "roster": "swarm_cli.key_commands:roster_app"},
    OPERATION: {
        "experiment": "swarm_cli.experiment_commands:experiment_app",
        "dlq": "swarm_cli.node_commands:dlq_app",
        "nats": "swarm_cli.nats.commands:nats_app",
        "k8s": "swarm_cli.k8s.commands:k8s_app",
    },
}
"""The module and name of each command and command group, under the headings of `swarm --help` and
in its order.
"""

HIDDEN = {"progress"}
"""Commands that `swarm --help` does not list: `swarm up` starts `progress` as a separate
process.
"""

EXIT_REPLACED = 78
REMEDY = "give Swarm an environment of its own (`python -m venv swarm-env`, and install it there)"
_VERSION = "--version"
_LOOKING_COMMANDS = {"answer", "ban", "dashboard", "dlq", "rollouts", "status", "top", "unban"}
_READING_COMMANDS = {"dashboard", "rollouts", "status", "top"}
_DERIVING_COMMANDS = {"answer", "config", "eval", "experiment", "join", "k8s", "new", "task"}


@cache
def build(only: str = "") -> typer.Typer:
    """The program with the command or group `only`; with all of them if that name is unknown, and
    with none if `only` asks for the version.
    """
    import typer

    built = typer.Typer(
        rich_markup_mode="markdown",  # the default reads "[default: ...]" as a style and swallows it
        name="swarm",
        help="Nodes that post-train language models with reinforcement learning and share their rollouts.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )

    @built.callback()
    def options(
        version: bool = typer.Option(False, _VERSION, is_eager=True, callback=_say_version, help="Print the version."),
    ) -> None:
        pass

    for heading, commands in COMMANDS.items():
        for name, where in commands.items():
            if _wanted(name, only):
                command = _found(where)
                built.command(
                    name=name,
                    hidden=name in HIDDEN,
                    rich_help_panel=heading,
                    short_help=_first_sentence(command.__doc__ or ""),
                )(command)
    for heading, groups in GROUPS.items():
        for name, where in groups.items():
            if _wanted(name, only):
                built.add_typer(_found(where), rich_help_panel=heading)
    return built


def _wanted(name: str, only: str) -> bool:
    known = {_VERSION}.union(*COMMANDS.values(), *GROUPS.values())
    return name == only or only not in known


def __getattr__(name: str) -> typer.Typer:
    """`app`: the program with every command."""
    if name == "app":
        return build()
    raise AttributeError(name)


def main() -> NoReturn:
    """Run a command. Report a failure as a sentence on standard error and an exit code, not as a
    traceback.
    """
    _refuse_replaced_packages()
    asked = sys.argv[1] if sys.argv[1:] else ""
    if asked in _DERIVING_COMMANDS:
        _fix_hash_seed()
    from shared.importing import without_collection
    from shared.runtime.logs import configure_logging
    from swarm_cli.console import note

    # Log lines do not mix with the result. Only errors: the command itself says what went wrong.
    configure_logging(level="error", log_format="console", stream=sys.stderr)
    sys.excepthook = lambda kind, error, where: note("".join(traceback.format_exception(kind, error, where)).rstrip())
    try:
        with without_collection():
            program = build(asked)
        program()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        note(f"swarm: {error}{_where_to_look(asked, error)}")
        sys.exit(code)
    sys.exit(0)


def _refuse_replaced_packages() -> None:
    """End with a sentence if another project's packages are in the place of ours."""
    try:
        import services.installed  # noqa: F401
    except ImportError as error:
        print(f"swarm: Python finds another project's package `services` first ({error}): {REMEDY}", file=sys.stderr)
        sys.exit(EXIT_REPLACED)


def _exit_code(error: Exception) -> int | None:
    """The exit code of an expected failure, which is reported as a sentence; None for a bug, which
    shows its traceback.
    """
    from shared.config import ConfigError
    from shared.runtime.exits import EXIT_CONFIG
    from shared.transport.base import TransportError
    from swarm_cli.errors import CommandError

    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    if isinstance(error, CommandError):
        return error.exit_code
    return 1 if isinstance(error, TransportError) else None


def _where_to_look(command: str, error: Exception) -> str:
    """The hint for a command that could not connect to a running swarm: which ended run could be
    started again or looked at, what this user is running in other folders, if no server was named,
    and how to name another one.
    """
    from shared.transport.base import NotConnected
    from swarm_cli.server_diagnosis import ServerSilent

    if command not in _LOOKING_COMMANDS or not isinstance(error, NotConnected) or isinstance(error, ServerSilent):
        return ""
    from swarm_cli.runs import RunGone, afterwards
    from swarm_cli.target import running_elsewhere

    look = _without_server(sys.argv[1:]) if command in _READING_COMMANDS else ""
    gone = [afterwards(error.folder, look)] if isinstance(error, RunGone) else []
    named = any(word.startswith("--node-url") for word in sys.argv)
    elsewhere = [] if named else running_elsewhere()
    lines = [*gone, *elsewhere, "To look at a swarm elsewhere, give its server: --node-url nats://HOST:PORT"]
    return "".join(f"\n{line}" for line in lines)


def _without_server(words: Sequence[str]) -> str:
    """The command as it was given, but for the server, which an ended run has no more."""
    from shared.text import visible

    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before != "--node-url" and not word.startswith("--node-url")
    ]
    return f"swarm {visible(shlex.join(kept), 400)}"


def _first_sentence(text: str) -> str:
    """The line of a list of commands; a command's own --help has all of `text`."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


def _found(where: str) -> typer.Typer:
    module, _, name = where.partition(":")
    found: typer.Typer = getattr(importlib.import_module(module), name)
    return found


def _say_version(asked: bool) -> None:
    if asked:
        import typer

        from shared.version import VERSION

        typer.echo(f"swarm {VERSION}")
        raise typer.Exit


def _fix_hash_seed() -> None:
    """Start again under hash seed 0, so that every dataset derives the same tasks as in the
    services. Called before the other imports, which would otherwise be done twice.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
