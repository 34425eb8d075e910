"""`swarm join`: from a token to a running node of a swarm."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shared.config import NodeConfig, load_config
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.config.model_section import ModelSection
from shared.config.section import sources_message
from shared.roles import OBSERVER
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.config_checks import check_objective
from swarm_cli.console import indented, note, say
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.invitation import Invitation, Member, given_invitation, given_text
from swarm_cli.join import findings
from swarm_cli.join.findings import Finding
from swarm_cli.join.hub import look_at_hub
from swarm_cli.join.newcomer import (
    JoinFolder,
    base_config,
    chosen_name,
    default_name,
    first_look,
    kept_tasks,
    node_settings,
    task_entries,
)
from swarm_cli.local.base_model import ensure_toy_policy, model_problem, toy_to_be_built
from swarm_cli.local.control import ControlHandler, answering, holding_run, refuse_running
from swarm_cli.local.procfile import DEFAULT_NATS_PORT, OTHER_PORTS, SWARM_URL_VARIABLE, Layout, check_ports, process_lines
from swarm_cli.local.supervisor import lines_for_people, run_lines
from swarm_cli.local.up import RolesOption, chosen_roles, configured_base_port, note_of, with_unsaved
from swarm_cli.model.facts import read_facts
from swarm_cli.replace_file import replace_file
from swarm_cli.runs import forget_end, write_end, write_note
from swarm_cli.task_probe import begin_deriving
from swarm_cli.toml_view import config_toml

_OTHER_TASKS = "name others with --tasks, or ask the operator for a token with smaller settings"


def join(
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="TOKEN", help="What `swarm invite` printed; - reads standard input.  [default: the variable JOIN_TOKEN]"
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The node's name.  [default: this machine's name and the end of the node's key]")] = "",
    model: Annotated[str, typer.Option(help="The policy: a folder, or a hub name.  [default: model.path]")] = "",
    revision: Annotated[str, typer.Option(help="The commit of a hub name.")] = "",
    tasks: Annotated[str, typer.Option(help="Datasets to train on, separated by commas.  [default: the swarm's]")] = "",
    check: Annotated[bool, typer.Option("--check", help="Only check and report; start nothing.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="All other settings, and [[tasks]].  [default: SWARM_CONFIG, or the demo's]"),
    ] = None,
    nats_port: Annotated[int, typer.Option(min=1024, max=65_535, help="Port of this node's NATS server.")] = DEFAULT_NATS_PORT,
    base_port: Annotated[
        int | None, typer.Option(min=1024, max=64_000, help="First metrics port.  [default: http.base_port]", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="End after this many steps; 0: run until Ctrl-C.")] = 0,
    roles: RolesOption = "",
    accept_roster: Annotated[
        bool | None,
        typer.Option(
            "--accept-roster/--keep-roster",
            help="Whether a later token's nodes are added to the roster.  [default: ask]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Join a swarm: make keys, check that this machine fits the swarm, and run a node.

    The node has its own NATS server on this machine, so it keeps training while the swarm's is
    unreachable. The same command again continues the same node.
    """
    invitation = given_invitation(given_text(token))
    if invitation.credential is not None and token not in (None, "-"):
        note("this token holds a key, and other users of this machine can see command lines: next time pipe it to `swarm join -`")
    chosen = partial(prepare, name=name, model=model, revision=revision, tasks=tasks, roles=chosen_roles(roles))
    prepared = partial(chosen, config=config, nats_port=nats_port)
    newcomer = prepared(without_roster(invitation) if accept_roster is False else invitation)
    failed = []
    for finding in chain(newcomer.look(thoroughly=check), newcomer.look_at_ports(nats_port, base_port) if check else ()):
        say(indented(finding.line))
        failed += [finding.what] if finding.ok is False else []
    if failed:
        raise CommandError(f"not joined: see {', '.join(failed)} above", EXIT_CONFIG)
    if check:
        say("all is well: omit --check to join")
        return
    added = newcomer.folder.lines_to_ask_about(newcomer.invitation.roster, newcomer.signing_key)
    if added and not accept_roster and not confirmed(added, newcomer.folder.roster_file.exists()):
        newcomer = prepared(without_roster(invitation))
    raise typer.Exit(newcomer.run(nats_port, base_port, steps))


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A node that is ready to start: its invitation, keys, files and configuration."""

    invitation: Invitation
    folder: JoinFolder
    config: NodeConfig
    signing_key: str
    """Public half."""
    hub_key: str
    """Public half; empty if the hub asks for none."""

    def look(self, *, thoroughly: bool) -> Iterator[Finding]:
        """Check everything, so that all problems can be mended at once. `thoroughly`: also read the
        model's tokenizer, which the services do anyway when they start.
        """
        invitation, config, accepts = self.invitation, self.config, self.invitation.accepts
        node = config.node.id
        # Two processes work while the hub is asked.
        model = _model_problems(config.model, thoroughly) if not toy_to_be_built(config) else list
        deriving = begin_deriving(config.tasks, config.eval.tasks, _OTHER_TASKS)
        with self._checking() as checked:
            hub = asyncio.run(look_at_hub(checked, given_key=invitation.credential is not None))
        if hub.reached:
            self.folder.confirm()
        yield findings.connection(hub, invitation, node, self.hub_key, self.signing_key)
        if not hub.refused and not hub.unreachable:
            yield from filter(None, [findings.clock(hub, accepts)])
            yield findings.name(hub, node, self.signing_key, default_name(node, self.signing_key))
            yield from filter(None, [findings.admission(invitation, node, self.signing_key)])
        yield findings.software(invitation, version("reasoning-gym"))
        yield findings.sizes(config, accepts)
        tasks = deriving()
        yield findings.tasks(config, accepts, sources_message(tasks.problems) if tasks.problems else "")
        yield from findings.rows(config, tasks.files)
        yield from (findings.Finding("reward", None, sentence) for sentence in tasks.reward_warnings)
        yield findings.model(config, model())

    def look_at_ports(self, nats_port: int, base_port: int | None) -> Iterator[Finding]:
        """Check what `run` refuses before it starts anything: that this node runs already, or that
        its ports are taken.
        """
        wanted, refused = self._layout(nats_port, base_port).ports, ""
        try:
            refuse_running(self._run_folder)
            self._check_ports(wanted)
        except CommandError as error:
            refused = str(error)
        yield findings.ports(wanted, refused)

    def run(self, nats_port: int, base_port: int | None, steps: int) -> int:
        """Write the token's contents and the node's configuration into the folder, and run the node
        until it ends; returns the exit code.

        Raises:
            CommandError: a port is taken, or the policy cannot be built.
        """
        config = self.config
        check_objective(config)
        layout, run_folder = self._layout(nats_port, base_port), self._run_folder
        with holding_run(run_folder):
            self._check_ports(layout.ports)
            ensure_toy_policy(config)
            self._configure(steps)
            forget_end(run_folder)
            write_note(run_folder, note_of(layout, "join", config.nats.swarm_id))
            outcome = run_lines(
                process_lines(layout),
                os.environ,
                ends_by_steps=steps > 0,
                log_file=run_folder / "up.log",
                beside=lambda supervisor: answering(run_folder, ControlHandler(supervisor).answer),
            )
            outcome = with_unsaved(outcome, run_folder, layout)
            write_end(run_folder, outcome.code, outcome.first)
        if outcome.first is None:
            note(f"stopped. The same `swarm join` continues it; it needs {self.folder.path} and {config.node.run_dir}")
        elif outcome.code:
            note(f"{outcome.first or 'a process'} ended with code {outcome.code}: see above, and {config.node.run_dir}")
        return outcome.code

    @property
    def _run_folder(self) -> Path:
        return self.config.node.var_dir / "runs" / self.config.node.run

    def _layout(self, nats_port: int, base_port: int | None) -> Layout:
        config = self.config
        return Layout(
            1,
            nats_port,
            base_port or configured_base_port(config, 1),
            config=self.folder.config_file,
            var_dir=config.node.var_dir,
            names=(config.node.id,),
            roles=config.node.role_names,
        )

    def _check_ports(self, wanted: Mapping[int, str]) -> None:
        # Nobody is told to stop those processes: one may be the hub's server, which has to go on.
        check_ports(wanted, f"choose other ports with {OTHER_PORTS}")

    @contextmanager
    def _checking(self) -> Iterator[NodeConfig]:
        """The configuration with the token's authority in a temporary file, because a check must
        not write it into the folder yet.
        """
        if not self.invitation.authority:
            yield self.config
            return
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:
            file.write(self.invitation.authority)
            file.flush()
            nats = self.config.nats.model_copy(update={"swarm_ca_file": file.name})
            yield self.config.model_copy(update={"nats": nats})

    def _configure(self, steps: int) -> None:
        """Write the authority, the roster and the node's configuration, point the processes to it,
        and print where things are.
        """
        config = self.config
        if self.invitation.authority:
            self.folder.keep_authority(self.invitation.authority)
        if self.invitation.roster:
            for member in self.folder.keep_roster(self.invitation.roster):
                note(
                    f"from the token, this node now admits {member.node} ({member.public_key}); "
                    f"`swarm roster remove {member.node} --file {self.folder.roster_file}` takes that back"
                )
        replace_file(self.folder.config_file, config_toml(config, ()))
        os.environ.update(
            {
                CONFIG_FILE_VARIABLE: str(self.folder.config_file),
                "SWARM_NODE__RUN": config.node.run,
                SWARM_URL_VARIABLE: self.invitation.url,
            }
            | ({"SWARM_TRAINER__MAX_STEPS": str(steps)} if steps else {})
            | lines_for_people(config)
        )
        note(
            f"node {config.node.id} joins the swarm called {self.invitation.swarm_id}; Ctrl-C or `swarm down` ends it, "
            "and the same command continues it"
        )
        note(f"files: {config.node.run_dir}; configuration: {self.folder.config_file}")
        note(f"look:  swarm top --config {self.folder.config_file}, swarm status --token TOKEN")


def prepare(
    invitation: Invitation,
    *,
    name: str = "",
    model: str = "",
    revision: str = "",
    tasks: str = "",
    roles: str = "",
    config: Path | None = None,
    nats_port: int = DEFAULT_NATS_PORT,
) -> Newcomer:
    """Make the folder and its keys, for the token's hub only, and the node's configuration. Nothing
    else is written before the node runs.

    Raises:
        CommandError, ConfigError: no node can have these options, the folder belongs to another
            hub, or its files cannot be used.
    """
    if invitation.credential is not None and invitation.credential.user == OBSERVER:
        raise CommandError(
            "this token only allows looking (`swarm status --token TOKEN`): ask the swarm's operator for one to join with"
        )
    chosen = config or (Path(os.environ[CONFIG_FILE_VARIABLE]) if os.environ.get(CONFIG_FILE_VARIABLE) else None)
    base = base_config(chosen, model)
    entries = task_entries(tasks, invitation) if tasks or chosen is None else []
    if not entries and chosen is None and base is None:
        raise CommandError("the token offers no tasks: name some with --tasks, or give --config with [[tasks]]")
    folder = JoinFolder(first_look(base, entries).node.var_dir / "joined" / invitation.swarm_id)
    folder.bind(invitation)
    if not tasks and chosen is None:
        entries = kept_tasks(entries, folder.known_tasks())
    folder.grown_roster(invitation.roster)
    signing_key = folder.signing_key().public_key
    hub_key = folder.hub_key(invitation.credential).public_key if invitation.url.startswith("tls://") else ""
    node = checked_node(chosen_name(name, invitation, folder, signing_key))
    settings = node_settings(invitation, folder, node, model=model, revision=revision, tasks=entries)
    if roles:
        settings["node"]["roles"] = roles
    settings["nats"]["node_url"] = f"nats://127.0.0.1:{nats_port}"
    ready = load_config(base, settings)
    return Newcomer(invitation, folder, ready, signing_key, hub_key)


def _model_problems(model: ModelSection, thoroughly: bool) -> Callable[[], list[str]]:
    """Begin to look for the model; the returned function waits for the problems."""
    if problem := model_problem(model.path, model.revision):
        return lambda: [problem]
    facts = read_facts(model) if thoroughly else None
    return lambda: facts().problems if facts else []


def without_roster(invitation: Invitation) -> Invitation:
    """The same token without lines of a roster."""
    return msgspec.structs.replace(invitation, roster=[])


def confirmed(added: list[Member], has_roster: bool) -> bool:
    """Return whether the person at the terminal wants these lines of a token added to the node's
    roster.

    Raises:
        CommandError: there is no terminal to ask at.
    """
    lines = "\n".join(f"  {member.node} {member.public_key}" for member in added)
    effect = "admit these nodes as well" if has_roster else "admit only these nodes and no longer any"
    told = (
        f"this node has joined before, and the token would make it {effect}; anybody with a token can have put them there:\n{lines}"
    )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CommandError(
            f"{told}\nif you know them (from the operator, through another channel than the token): --accept-roster; to join with "
            "the roster as it is: --keep-roster"
        )
    typer.echo(told, err=True)
    return typer.confirm("Admit them? (n: join with the roster as it is)", default=False, err=True)
