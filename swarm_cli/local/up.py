"""`swarm up`: a NATS server and N nodes on this machine, started by the same lines as the
Procfile's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig, load_config
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.config.section import told
from shared.config.sections import RUN_PATTERN
from shared.contracts.wire import is_node_name
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.config_checks import check_objective
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG, shown
from swarm_cli.local.base_model import ensure_toy_policy
from swarm_cli.local.control import answering, holding_run
from swarm_cli.local.control_requests import ControlHandler
from swarm_cli.local.launch import GRACE_S, lines_for_people, run_lines
from swarm_cli.local.ports import OTHER_PORTS, check_ports
from swarm_cli.local.procfile import (
    DEFAULT_NATS_PORT,
    MAX_NODES,
    PORTS_PER_NODE,
    Layout,
    process_lines,
    render_procfile,
)
from swarm_cli.local.resume_options import resume_options
from swarm_cli.local.run_messages import RunSummary, announce, explain_end, swarm_of_run
from swarm_cli.risky_settings import left_out_rows, risky_settings, row_limit_warnings
from swarm_cli.runs import Given, forget_end, write_end
from swarm_cli.task_probe import SMALLER, begin_deriving

_HIGHEST_PORT = 65_535
_OTHER_PORTS = f"stop those processes, or choose other ports with {OTHER_PORTS} (make run: UP_FLAGS='{OTHER_PORTS}')"


def up(
    nodes: Annotated[
        int | None, typer.Option(min=1, max=MAX_NODES, help="How many nodes.  [default: the run's, or 2]", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="End when every trainer has taken this many steps; 0: run until Ctrl-C.")] = 0,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Name of a node, once for each.  [default: alpha, beta, ...]", show_default=False),
    ] = None,
    run: Annotated[str, typer.Option(help="Name of the run; that of an earlier run continues it, with its options.")] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration of every node.  [default: SWARM_CONFIG, the run's or the demo's]", show_default=False),
    ] = None,
    base_port: Annotated[
        int | None,
        typer.Option(
            min=1024,
            max=64_000,
            help="First metrics port; ten per node.  [default: the run's, or http.base_port]",
            show_default=False,
        ),
    ] = None,
    nats_port: Annotated[
        int | None,
        typer.Option(min=1024, max=65_535, help="Port of the NATS server.  [default: the run's, or 4222]", show_default=False),
    ] = None,
    nats_url: Annotated[str, typer.Option(help="Use this server instead of starting one.")] = "",
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show the nodes' progress.")] = True,
    grace_s: Annotated[float, typer.Option(min=1, help="Seconds that a process may take to end before it is killed.")] = GRACE_S,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the services' whole logs, not only warnings.")] = False,
    print_procfile: Annotated[bool, typer.Option("--print-procfile", help="Print the lines instead of running them.")] = False,
) -> None:
    """Run a swarm on this machine: a NATS server, N nodes of four services each, and a progress
    view. Ctrl-C or `swarm down` ends it; closing the terminal does not.
    """
    if steps and not progress:
        raise CommandError("--steps needs the progress view, which ends the run: omit --no-progress")
    given, taken = resume_options(Given(nodes, tuple(name or []), config, nats_port, nats_url, base_port), checked_run(run))
    if taken and not print_procfile:
        note(f"run {run}: continued with its earlier options, {' '.join(taken)}")
    nodes = given.nodes or len(given.names) or Layout().nodes
    environment = run_environment(given.config, run or time.strftime("%Y%m%d-%H%M%S"), steps)
    os.environ.update(environment)
    node_config = load_config()
    layout = Layout(
        nodes,
        given.nats_port or DEFAULT_NATS_PORT,
        given.base_port or configured_base_port(node_config, nodes),
        given.nats_url or None,
        progress,
        Path(environment[CONFIG_FILE_VARIABLE]),
        node_config.node.var_dir,
        chosen_names(list(given.names), nodes),
    )
    if print_procfile:
        typer.echo(render_procfile(layout), nl=False)
        return
    os.environ.update(swarm_of_run(node_config, layout) | lines_for_people(node_config))
    if not verbose and "level" not in node_config.log.model_fields_set:
        os.environ["SWARM_LOG__LEVEL"] = "warning"
    check_tasks = tasks_checked(node_config, alone=layout.nodes == 1 and not layout.nats_url)
    check_objective(node_config)
    warnings = [*risky_settings(node_config), *check_tasks()]
    ensure_toy_policy(node_config)
    folder = node_config.node.var_dir / "runs" / node_config.node.run
    with holding_run(folder):
        check_ports(layout.ports, _OTHER_PORTS)
        announce(node_config, layout)
        forget_end(folder)
        ran = RunSummary(node_config, layout)
        for sentence in warnings:
            note(f"warning: {sentence}")
        outcome = run_lines(
            process_lines(layout),
            os.environ,
            ends_by_steps=node_config.trainer.max_steps > 0 and progress,
            grace_s=grace_s,
            log_file=folder / "up.log",
            beside=lambda supervisor: answering(folder, ControlHandler(supervisor, layout, ran.grow).answer),
        )
        write_end(folder, outcome.code, outcome.first)
    explain_end(outcome, node_config, ran.layout)
    raise typer.Exit(outcome.code)


def tasks_checked(config: NodeConfig, *, alone: bool) -> Callable[[], list[str]]:
    """Begin to derive a task from each source, with a deadline and a memory limit, which the
    services do not have: they would refuse a wrong source half a minute later, and one that
    demands too much would take this machine's memory. The returned function waits, raises
    CommandError if a source cannot be used, and returns warnings. alone: whether no other node is
    there.
    """
    derived = begin_deriving(config.tasks, config.eval.tasks, SMALLER)

    def check() -> list[str]:
        if problems := derived.problems():
            raise CommandError(f"{told(problems)}\nnothing was started", EXIT_CONFIG)
        return [
            *left_out_rows(derived.files),
            *([] if alone else row_limit_warnings(config, derived.files)),
            *derived.reward_warnings,
        ]

    return check


def checked_run(run: str) -> str:
    """The name given with `--run`; empty for a new one. Raises CommandError if it is not valid."""
    if run and not re.fullmatch(RUN_PATTERN, run):
        raise CommandError(f"--run {run[:80]!r}: use 1 to 64 letters, digits or . _ -, beginning with a letter or digit")
    return run


def chosen_names(names: list[str], nodes: int) -> tuple[str, ...]:
    """The names given with `--name`. Raises CommandError unless they name `nodes` nodes or none."""
    for each in names:
        if not is_node_name(each):
            raise CommandError(f"--name {each}: not a node name: use 1 to 32 lower-case letters, digits and hyphens")
    if twice := next((each for each in names if names.count(each) > 1), ""):
        raise CommandError(f"--name {twice} is given more than once: give each node a name of its own")
    if names and len(names) != nodes:
        given = "1 name is" if len(names) == 1 else f"{len(names)} names are"
        raise CommandError(f"{given} given with --name, and --nodes is {nodes}: give each node one")
    return tuple(names)


def run_environment(config: Path | None, run: str, steps: int) -> dict[str, str]:
    """The environment variables that differ between runs. Together with their lines they are all
    that the processes get from `swarm up`.
    """
    chosen = config or Path(os.environ.get(CONFIG_FILE_VARIABLE) or shown(DEMO_CONFIG))
    environment = {CONFIG_FILE_VARIABLE: str(chosen), "SWARM_NODE__RUN": run}
    if steps:
        environment["SWARM_TRAINER__MAX_STEPS"] = str(steps)
    return environment


def configured_base_port(config: NodeConfig, nodes: int) -> int:
    """`http.base_port` for the first node; the others follow, ten apart. 0: any free ports.

    Raises:
        CommandError: the ports of `nodes` nodes do not fit above it, or `http.port` gives all
            processes the same port.
    """
    if config.http.port is not None:
        raise CommandError(
            f"http.port is {config.http.port} for every process, but {4 * nodes} processes share this machine: remove http.port "
            "(or unset SWARM_HTTP__PORT) and set http.base_port",
            EXIT_CONFIG,
        )
    base_port = config.http.base_port
    if base_port + PORTS_PER_NODE * nodes > _HIGHEST_PORT:
        raise CommandError(
            f"http.base_port is {base_port}, and {PORTS_PER_NODE} ports each for {nodes} nodes go past {_HIGHEST_PORT}: lower it",
            EXIT_CONFIG,
        )
    return base_port
