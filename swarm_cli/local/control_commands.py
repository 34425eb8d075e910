"""`swarm down`, `swarm restart` and `swarm add`: control a running `swarm up` from any terminal of
its machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.local.control import ask, running_run, wait_until_over
from swarm_cli.local.control_requests import named
from swarm_cli.local.untrusted_run import reject_escaping_links
from swarm_cli.runs import VAR_DIR_VARIABLE, goes_on, restart_options

Run = Annotated[str, typer.Option(help="Name of the run.  [default: the running one]", show_default=False)]
VarDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder that holds runs/.  [default: var; a named run is found in any]", envvar=VAR_DIR_VARIABLE, show_default=False
    ),
]
_PATIENCE_S = 900.0
"""Longer than any --grace-s that people give."""


def down(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of the run.  [default: the running one]", show_default=False)
    ] = "",
    now: Annotated[bool, typer.Option("--now", help="Kill every process, without letting it write its state.")] = False,
    var_dir: VarDir = None,
) -> None:
    """End a run that `swarm up` started on this machine, and wait until it has ended."""
    folder = running_run(run, var_dir)
    ask(folder, {"do": "down", "now": now})
    if not wait_until_over(folder, _PATIENCE_S):
        raise CommandError(f"run {folder.name} did not end within {_PATIENCE_S:g} s: `swarm down {folder.name} --now` kills it")
    note(f"run {folder.name} has ended; to continue it: {goes_on(folder)}")


def restart(
    service: Annotated[
        str,
        typer.Argument(
            metavar="SERVICE", help="Such as alpha-trainer or nats; or a role (trainer), for every node's.", show_default=False
        ),
    ] = "",
    run: Run = "",
    now: Annotated[bool, typer.Option("--now", help="Kill it at once, without letting it write its state.")] = False,
    grace_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that it may take to end before it is killed.  [default: swarm up's]", show_default=False),
    ] = None,
    var_dir: VarDir = None,
) -> None:
    """End a service of a running swarm and start it again, even if it was given up, is stopped or
    hangs.
    """
    folder = running_run(run, var_dir)
    told = ask(folder, {"do": "states"})
    allowed_s = 0.0 if now else float(told["grace_s"]) if grace_s is None else grace_s
    running = {
        name: state for name in named(service, told["processes"]) if (state := told["processes"][name]).startswith("process ")
    }
    if running and allowed_s:
        each = " each, one after the other" if len(running) > 1 else ""
        note(
            f"waiting for {', '.join(f'{name} ({state})' for name, state in running.items())} to save its state and end, "
            f"at most {allowed_s:g} s{each}; `swarm restart {service} --now{restart_options(folder)}` in another terminal kills it"
        )
    deadline_s = _PATIENCE_S + allowed_s * len(running)
    answer = ask(folder, {"do": "restart", "service": service, "grace_s": allowed_s}, deadline_s)
    for line in answer.get("said", []):
        note(line)


def add(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of the run.  [default: the running one]", show_default=False)
    ] = "",
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes to add.")] = 1,
    run_option: Annotated[str, typer.Option("--run", help="The same as RUN.", show_default=False)] = "",
    var_dir: VarDir = None,
) -> None:
    """Add a node to a swarm running on this machine, with the swarm's configuration and the next
    free name.
    """
    if run and run_option and run != run_option:
        raise CommandError(f"two runs are named, {run} and --run {run_option}: name one")
    folder = running_run(run or run_option, var_dir)
    reject_escaping_links(folder)
    for line in ask(folder, {"do": "add", "nodes": nodes}, _PATIENCE_S).get("said", []):
        note(line)
    note(f"to continue this run with all its nodes later: {goes_on(folder)}")
