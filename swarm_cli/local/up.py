"""`swarm up`: a NATS server and N nodes on this machine, started by the same lines as the
Procfile's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import structs

from shared.config import NodeConfig, load_config
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.config.node_sections import RUN_PATTERN
from shared.config.section import sources_message
from shared.contracts.wire import DEFAULT_SWARM_ID, is_node_name
from shared.roles import ROLE_SETS, ROLES
from shared.runtime.exits import EXIT_CONFIG, EXIT_UNSAVED
from shared.text import visible
from swarm_cli.chosen_config import default_file, load_chosen
from swarm_cli.config_checks import check_objective
from swarm_cli.console import count, note
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG, shown
from swarm_cli.local.base_model import ensure_toy_policy, is_toy
from swarm_cli.local.control import ControlHandler, answering, holding_run
from swarm_cli.local.procfile import (
    DEFAULT_NATS_PORT,
    OTHER_PORTS,
    PORTS_PER_NODE,
    SWARM_URL_VARIABLE,
    Layout,
    check_ports,
    process_lines,
    render_procfile,
)
from swarm_cli.local.supervisor import GRACE_S, Outcome, lines_for_people, run_lines
from swarm_cli.observe.remedies import next_commands
from swarm_cli.observe.run_files import unsaved_words
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.risky_settings import left_out_rows, risky_settings, sharing_warnings, toys_settings
from swarm_cli.runs import (
    MAX_NODES,
    NOTE,
    RunNote,
    StartOptions,
    forget_end,
    in_a_run,
    is_own,
    killed_often,
    read_note,
    steps_taken,
    write_end,
    write_note,
)
from swarm_cli.target import where_runs_are
from swarm_cli.task_probe import IN_SETS, SMALLER, begin_deriving

_HIGHEST_PORT = 65_535
RolesOption = Annotated[
    str,
    typer.Option(
        metavar="ROLE,...",
        help="generator,verifier: a node that trains nothing. verifier: one for people's answers.  [default: node.roles]",
        show_default=False,
    ),
]
_OTHER_PORTS = f"stop those processes, or choose other ports with {OTHER_PORTS} (make run: UP_FLAGS='{OTHER_PORTS}')"


def up(
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_NODES, help="How many nodes.  [default: the run's, or 2; 1 if sampler.external is 0]", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="End when every trainer has taken this many steps; 0: run until Ctrl-C.  [default: the run's, unless taken, or 0]",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Name of a node, once for each.  [default: alpha, beta, ...]", show_default=False),
    ] = None,
    run: Annotated[str, typer.Option(help="Name of the run; that of an earlier run continues it, with its options.")] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration of every node.  [default: SWARM_CONFIG, the run's, ./node.toml or the demo's]", show_default=False
        ),
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
    roles: RolesOption = "",
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
    of_trainer = steps if progress else 0
    asked = StartOptions(
        nodes, tuple(name or []), str(config or ""), nats_port, nats_url, base_port, of_trainer, chosen_roles(roles)
    )
    given, taken = resume_options(asked, checked_run(run))
    if taken and not print_procfile:
        note(f"run {run}: continued with its earlier options, {' '.join(taken)}")
    environment = run_environment(_path(given), run or time.strftime("%Y%m%d-%H%M%S"), given.steps or 0)
    if given.roles:
        environment["SWARM_NODE__ROLES"] = given.roles
    os.environ.update(environment)
    node_config = load_config()
    nodes = given.nodes or len(given.names) or usual_nodes(node_config)
    layout = Layout(
        nodes,
        given.nats_port or DEFAULT_NATS_PORT,
        given.base_port or configured_base_port(node_config, nodes),
        given.nats_url or None,
        progress,
        Path(environment[CONFIG_FILE_VARIABLE]),
        node_config.node.var_dir,
        chosen_names(list(given.names), nodes),
        node_config.node.role_names,
    )
    if given.steps and "trainer" not in layout.roles:
        raise CommandError("--steps counts a trainer's steps, and these nodes have none: omit one of --steps and --roles")
    if print_procfile:
        typer.echo(render_procfile(layout), nl=False)
        return
    os.environ.update(swarm_of_run(node_config, layout) | lines_for_people(node_config))
    if not verbose and "level" not in node_config.log.model_fields_set:
        os.environ["SWARM_LOG__LEVEL"] = "warning"
    check_tasks = tasks_checked(node_config, alone=layout.nodes == 1 and not layout.nats_url)
    check_objective(node_config)
    warnings = [*risky_settings(node_config), *toys_settings(node_config, toy=is_toy(node_config.model.path)), *check_tasks()]
    ensure_toy_policy(node_config)
    folder = run_folder(node_config)
    with holding_run(folder):
        check_ports(layout.ports, _OTHER_PORTS)
        announce(node_config, layout)
        forget_end(folder)
        note_run(node_config, layout, given.steps)
        for sentence in warnings:
            note(f"warning: {sentence}")
        outcome = run_lines(
            process_lines(layout),
            os.environ,
            ends_by_steps=node_config.trainer.max_steps > 0 and progress,
            grace_s=grace_s,
            log_file=folder / "up.log",
            beside=lambda supervisor: answering(folder, ControlHandler(supervisor).answer),
        )
        outcome = with_unsaved(outcome, folder, layout)
        write_end(folder, outcome.code, outcome.first)
    explain_end(outcome, node_config, layout)
    raise typer.Exit(outcome.code)


def tasks_checked(config: NodeConfig, *, alone: bool) -> Callable[[], list[str]]:
    """Begin to derive a task from each source, with a deadline and a memory limit, which the
    services do not have: they would refuse a wrong source half a minute later, and one that
    demands too much would take this machine's memory. The returned function waits, raises
    CommandError if a source cannot be used, and returns warnings. alone: whether no other node is
    there.
    """
    deriving = begin_deriving(config.tasks, config.eval.tasks, SMALLER, sets=config.eval.sets, scoring=config.verifier)

    def check() -> list[str]:
        derived = deriving()
        if derived.problems:
            raise CommandError(f"{sources_message(derived.problems)}\nnothing was started", EXIT_CONFIG)
        return [
            *left_out_rows(derived.files),
            *([] if alone else sharing_warnings(config, derived)),
            *derived.reward_warnings,
            *([f"{count(derived.rows_in_sets, 'row')} to train on {IN_SETS}"] if derived.rows_in_sets else []),
        ]

    return check


def usual_nodes(config: NodeConfig) -> int:
    """The number of nodes that start if none is given: nodes that share nothing gain nothing from
    each other.
    """
    return Layout().nodes if config.sampler.external else 1


def checked_run(run: str) -> str:
    """The name given with `--run`; empty for a new one. Raises CommandError if it is not valid."""
    if run and not re.fullmatch(RUN_PATTERN, run):
        raise CommandError(f"--run {run[:80]!r}: use 1 to 64 letters, digits or . _ -, beginning with a letter or digit")
    return run


def chosen_roles(given: str) -> str:
    """`--roles` as `node.roles` has it; empty if it is not given. Raises CommandError for roles
    that make no node.
    """
    if not given:
        return ""
    names = {each.strip() for each in given.split(",")}
    for roles in ROLE_SETS:
        if names == set(roles.split(",")) or (roles == "all" and names == set(ROLES)):
            return roles
    raise CommandError(
        f"--roles {visible(given, 100)}: a node has {' or '.join(ROLE_SETS)}: a sampler and a trainer need each other, and groups "
        "of the node's own"
    )


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
    chosen = config or Path(os.environ.get(CONFIG_FILE_VARIABLE) or shown(default_file()))
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


# What a run that is continued takes over from its last start.

STORE = "jetstream"
"""The server's folder in a run's."""


def resume_options(given: StartOptions, run: str) -> tuple[StartOptions, list[str]]:
    """Complete `given` with the options of the run's earlier start that are missing now, and list
    those that were added. An earlier option that contradicts a given one is left out. Nothing is
    taken over from a run whose files were copied here.

    Raises:
        CommandError: the run was copied here, or another version wrote its note, and no
            configuration is given; or the earlier start's configuration lies in a run's folder; or
            the run was started in another folder, from which its configuration names files.
    """
    folder = load_chosen(_path(given), NodeConfig).node.var_dir / "runs" / run
    note, named = read_note(folder) if run else None, given.config or os.environ.get(CONFIG_FILE_VARIABLE)
    if note is None or not is_own(folder):
        if run and not named and any((folder / name).exists() for name in (NOTE, STORE)):
            options = note.options if note is not None and isinstance(note.options, StartOptions) else StartOptions()
            words = visible(" ".join(options.words()), 400)
            known = f" (it was started with {words})" if words else ""
            raise CommandError(
                f"the files of run {run} were copied here or changed since its last start, or another version wrote them: they may "
                f"be somebody else's, and starting it opens their NATS store{known}. If you trust it, name its configuration with "
                "--config, and give its other options again"
            )
        return given, []
    before = note.options if isinstance(note.options, StartOptions) else StartOptions()
    if given.nodes or given.names:
        before = structs.replace(before, nodes=None, names=())
    if given.steps is not None or steps_taken(folder, before.steps or 0):
        before = structs.replace(before, steps=None)
    if given.nats_url or given.nats_port:
        before = structs.replace(before, nats_url="", nats_port=None)
    if named:
        before = structs.replace(before, config="")
    if before.config and in_a_run(before.config, folder):
        raise CommandError(
            f"run {run} was last started with the configuration {visible(before.config, 200)}, which lies in a run's folder, so "
            "whoever made that run may have written it: read it, and give it with --config, or give your own"
        )
    missing = {name: getattr(before, name) for name in before.__struct_fields__ if not getattr(given, name)}
    complete = structs.replace(given, **missing)
    if note.started_in:
        _refuse_other_files(run, Path(note.started_in), load_chosen(_path(complete), NodeConfig))
    return complete, list(StartOptions(**missing).words())


def _path(options: StartOptions) -> Path | None:
    return Path(options.config) if options.config else None


def _refuse_other_files(run: str, started_in: Path, config: NodeConfig) -> None:
    """Raises CommandError if the run was started in another folder, in which its model or a file of
    tasks lies that the configuration names relative to it: here it would be another, or be built
    anew.
    """
    files = [config.model.path, *(spec.path for spec in (*config.tasks, *config.eval.sets) if spec.source == "file")]
    for path in map(Path, files):
        there = started_in / path
        if there.exists() and not (path.exists() and path.samefile(there)):
            raise CommandError(
                f"run {run} was started in {visible(str(started_in), 400)}, and its configuration names {visible(str(path), 200)} "
                "relative to that folder: start it there, or name the whole path in the configuration"
            )


# The note of the run, and what is printed at its start and end.


def note_of(layout: Layout, options: StartOptions | Literal["join"], swarm_id: str = "", ends_after: int = 0) -> RunNote:
    """The note for a run with this layout, whose nodes are in this swarm. ends_after: as in
    `RunNote`.

    A configuration file's `nats.swarm_url` is not where they share: the Procfile's lines take the
    variable from outside, or else the layout's server.
    """
    return RunNote(layout.url, os.environ.get(SWARM_URL_VARIABLE) or layout.url, options, swarm_id, os.getcwd(), ends_after)


def swarm_of_run(config: NodeConfig, layout: Layout) -> dict[str, str]:
    """The environment variable that names the swarm after the run, so that a server started here
    keeps runs apart: its folder may still hold an earlier run's groups.

    Empty with somebody else's server, or if the configuration names a swarm.
    """
    if layout.nats_url or config.nats.swarm_id != DEFAULT_SWARM_ID:
        return {}
    return {"SWARM_NATS__SWARM_ID": config.node.run}


def start_options(config: NodeConfig, layout: Layout, steps: int | None = None) -> StartOptions:
    """The options of `swarm up` that its defaults and `config` do not cover, from any folder.
    steps: as given.
    """
    file = os.path.abspath(layout.config)
    other_port = not layout.nats_url and layout.nats_port != DEFAULT_NATS_PORT
    return StartOptions(
        layout.nodes if layout.nodes != usual_nodes(config) else None,
        tuple(layout.names and layout.node_names),
        "" if file == str(DEMO_CONFIG) else file,
        layout.nats_port if other_port else None,
        layout.nats_url or "",
        layout.base_port if layout.base_port != config.http.base_port else None,
        steps or None,
        "" if layout.roles == ROLES else config.node.roles,
    )


def note_run(config: NodeConfig, layout: Layout, steps: int | None = None) -> None:
    """Write the run's note, by which other commands find its servers and options. steps: as
    given.
    """
    swarm_id = swarm_of_run(config, layout).get("SWARM_NATS__SWARM_ID", config.nats.swarm_id)
    write_note(run_folder(config), note_of(layout, start_options(config, layout, steps), swarm_id, config.trainer.max_steps))


def run_folder(config: NodeConfig) -> Path:
    """The folder of the configuration's run."""
    return config.node.var_dir / "runs" / config.node.run


def nodes_before(folder: Path) -> list[str]:
    """The nodes of a run's earlier starts. They are recognised by their trainer's log, because the
    server's folder lies beside theirs.
    """
    logs = folder.glob("*/trainer.log")
    return sorted(log.parent.name for log in logs if is_node_name(log.parent.name))


def announce(config: NodeConfig, layout: Layout) -> None:
    """Print what starts, where its files are, and how to look at it and end it."""
    folder = run_folder(config)
    before = nodes_before(folder)
    steps = config.trainer.max_steps
    known = "continues where it stopped" if set(before) & set(layout.node_names) else "new"
    until = f"ends after {count(steps, 'step')}" if steps else "until Ctrl-C"
    note(f"run {config.node.run}: {known}, {count(layout.nodes, 'node')} ({', '.join(layout.node_names)}), {until}")
    if not layout.names and (left_out := [name for name in before if name not in layout.node_names]):
        note(
            f"warning: this run also has {', '.join(left_out)}, which {'is' if len(left_out) == 1 else 'are'} not started: "
            f"--nodes {layout.nodes + len(left_out)} starts every node"
        )
    note(f"files: {folder}/<node>/ (metrics.jsonl, eval.jsonl, <role>.log)")
    elsewhere = "" if layout.url == Layout().url else f" --node-url {layout.url}"
    note(f"look:  swarm top{elsewhere} (one screen, live)")
    note(f"       swarm dashboard{elsewhere} (in a browser; make dashboard)")
    note(f"end:   Ctrl-C, or swarm down {config.node.run}; only warnings are shown here (--verbose: all)")


def with_unsaved(outcome: Outcome, folder: Path, layout: Layout) -> Outcome:
    """`outcome`, unless the run took all its steps and a trainer was killed before it saved the
    last one.
    """
    unsaved = [name for name in layout.node_names if unsaved_words(folder / name)] if outcome.code == 0 else []
    return Outcome(EXIT_UNSAVED, f"{unsaved[0]}-trainer") if unsaved else outcome


def explain_end(outcome: Outcome, config: NodeConfig, layout: Layout) -> None:
    """Print the run's results and what to do with it, or which process ended it and why."""
    folder = run_folder(config)
    if outcome.first is None or outcome.code == EXIT_UNSAVED:
        # For a run that completed its steps the progress view has printed the verdict already.
        for line in run_verdicts(folder, list(dict.fromkeys([*layout.node_names, *nodes_before(folder)])), ended=True):
            note(line)
        unsaved = f"{outcome.first} could not save its last policy (exit code {EXIT_UNSAVED})"
        note(f"{unsaved if outcome.code == EXIT_UNSAVED else 'stopped'}; next:")
        for command, what in next_commands(folder, layout.node_names[0], where_runs_are(config)):
            note(f"  {command}      {what}")
        return
    if outcome.code == 0:
        return
    node, _, role = outcome.first.rpartition("-")
    log = folder / (Path(node) / f"{role}.log" if node else Path(f"{outcome.first}.log"))
    if often := killed_often(outcome.code):
        note(
            f"{outcome.first} {often}, so everything was stopped. It could not say why: see what kills it "
            f"(`dmesg | grep -i oom` for a lack of memory); its log is {log}"
        )
        return
    why = "cannot go on" if outcome.code == EXIT_CONFIG else f"ended with code {outcome.code}"
    note(f"{outcome.first} {why}, so everything was stopped. Its last lines are in {log}")
