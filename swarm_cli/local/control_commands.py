"""`swarm down`, `swarm restart` and `swarm add`: what one asks of a running `swarm up`, from any
terminal of its machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.local.control import ask, running_run, wait_until_over
from swarm_cli.observe.plot import DEFAULT_VAR_DIR, VAR_DIR_VARIABLE
from swarm_cli.running import goes_on

Run = Annotated[str, typer.Option(help="Name of the run.  [default: the one that runs]", show_default=False)]
VarDir = Annotated[Path, typer.Option(help="Where runs are.", envvar=VAR_DIR_VARIABLE)]
_PATIENCE_S = 900.0
"""Longer than the grace that anybody gives a process to end in."""


def down(
    run: Annotated[str, typer.Argument(help="Name of the run.  [default: the one that runs]", show_default=False)] = "",
    now: Annotated[bool, typer.Option("--now", help="Kill every process instead of letting it write what it has.")] = False,
    var_dir: VarDir = DEFAULT_VAR_DIR,
) -> None:
    """End a run that `swarm up` runs on this machine, and wait until it has ended."""
    folder = running_run(run, var_dir)
    ask(folder, {"do": "down", "now": now})
    if not wait_until_over(folder, _PATIENCE_S):
        raise CommandError(f"run {folder.name} has not ended within {_PATIENCE_S:g} s: `swarm down {folder.name} --now` kills it")
    note(f"run {folder.name} has ended; go on with it: {goes_on(folder)}")


def restart(
    service: Annotated[str, typer.Argument(help="Such as alpha-trainer; or a role, for that of every node; or nats.")],
    run: Run = "",
    var_dir: VarDir = DEFAULT_VAR_DIR,
) -> None:
    """End one service of a running swarm and start it again, also one that was given up."""
    answer = ask(running_run(run, var_dir), {"do": "restart", "service": service}, _PATIENCE_S)
    for line in answer.get("said", []):
        note(line)


def add(
    nodes: Annotated[int, typer.Option(min=1, help="How many more.")] = 1,
    run: Run = "",
    var_dir: VarDir = DEFAULT_VAR_DIR,
) -> None:
    """Add a node to a swarm that runs on this machine, with that swarm's configuration and the next
    name.
    """
    folder = running_run(run, var_dir)
    for line in ask(folder, {"do": "add", "nodes": nodes}, _PATIENCE_S).get("said", []):
        note(line)
    note(f"to go on with this run and all its nodes later: {goes_on(folder)}")
