"""`swarm status`: the nodes of a swarm, what each does, and how full the streams are; with --url or
--token, a swarm as its hub shows it to spectators. It only reads.

| exit code | |
|---|---|
| 0 | the swarm is running: at least one of its processes is alive; or the hub answers |
| 1 | no server answers, none has written to it, its store is empty, or it lacks a given node |
| 2 | the command was called wrongly |
| 3 | the run has ended in order |
| 4 | the run has failed, or was killed |
| 78 | the configuration cannot be used |
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shared.config.verifier_section import ViewConfig
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.contracts.wire import SWARM_SCHEMA_VERSION
from shared.identity.permissions import SWARM_ACCOUNT, user_account
from shared.identity.statements import SignatureStatus
from shared.roles import OBSERVER, ROLES
from shared.text import visible, visible_json
from shared.transport.base import AccessDenied, NotConnected, Transport
from shared.transport.connect import connect
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import cell, count, note, terminal
from swarm_cli.errors import CommandError
from swarm_cli.invitation import TOKEN_VARIABLE, Invitation, TokenError, checked_urls, given_invitation, given_text
from swarm_cli.observe.evaluation_log import EvaluationLog, configured_swarm, roster_of
from swarm_cli.observe.node_lines import elsewhere_table, node_lines
from swarm_cli.observe.node_state import NodeState, StreamFill, duration
from swarm_cli.observe.remedies import advice, folder_here, server_trouble
from swarm_cli.observe.run_files import set_lines
from swarm_cli.observe.snapshot import NO_STATUS, NOBODY, START, SwarmState, look_at_hub, take_snapshot
from swarm_cli.runs import RunEnd, RunGone
from swarm_cli.target import LookRunOption, Target, check_listening, ended_here, looking_at

NAMES_A_LINE = 5
CONNECT_S, HUB_CONNECT_S = 5.0, 10.0
STATUS_S = 60.0
"""For a look at a hundred nodes over a slow line."""


def status(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="NODE", help="Nodes to show.  [default: all found]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    run: LookRunOption = "",
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
    url: Annotated[str, typer.Option(help="Look from outside: the address of a swarm's hub.")] = "",
    token: Annotated[str, typer.Option(help="Look from outside, with a token; -: JOIN_TOKEN's, or standard input.")] = "",
    key: Annotated[Path | None, typer.Option(help="With --url: key file of the user `observer`, for a secured hub.")] = None,
    ca: Annotated[Path | None, typer.Option(help="With --url: PEM file of the authority of the hub's certificate.")] = None,
) -> None:
    """Show nodes, what each does, its scores, stream fill and consumer lag; with --url or --token,
    a swarm from outside. Exit code 1: no service has reported; 3: the run has ended in order; 4: it
    failed or was killed.
    """
    if url or token:
        if url and token:
            raise CommandError("--url and --token both say where to look: give one of them")
        _show_hub(url, token, key, ca, as_json=as_json)
        return
    node_config = load_chosen(config, ViewConfig)
    with looking_at(node_config, run, node_url, swarm_url) as target:
        try:
            check_listening(node_config.node.var_dir, target)
            snapshot = asyncio.run(_snapshot(node_config, target, nodes or []))
        except RunGone as gone:
            if not as_json:
                raise gone.ending("swarm status") from None
            ended = _end_object((gone.folder, gone.end))
            typer.echo(visible_json({"at": time.time(), "nodes": {}, "ended": ended}, indent=2))
            raise typer.Exit(gone.end.exit_code) from None
    lives = any(node.unknown or node.alive(role) for node in snapshot.nodes for role in ROLES)
    end = None if lives else ended_here(node_config.node.var_dir, target)
    server = "" if end is not None else server_trouble(snapshot.here, node_config.node.var_dir, target)
    if as_json:
        typer.echo(visible_json(as_object(snapshot) | {"server_problem": server, "ended": _end_object(end)}, indent=2))
    else:
        if end is not None:
            note(end[1].sentence(end[0].name, time.time()))
        run_dir = folder_here(node_config.node.var_dir, target)
        show(snapshot, terminal(), run_dir, server, records=run_dir if end is None else end[0])
    if end is not None:
        raise typer.Exit(end[1].exit_code)
    refuse_nothing_seen(snapshot, named=bool(nodes), told=as_json or bool(server))


def refuse_nothing_seen(snapshot: SwarmState, *, named: bool, told: bool) -> None:
    """End with code 1 if no process has reported. named: nodes were. told: the cause is printed."""
    if any(node.statuses or node.unknown or (named and node.elsewhere) for node in snapshot.nodes):
        return
    raise typer.Exit(1) if told else CommandError(f"{NO_STATUS if snapshot.nodes else NOBODY}: {START}")


async def _snapshot(config: ViewConfig, target: Target, nodes: list[str]) -> SwarmState:
    try:
        reports = EvaluationLog(roster=roster_of(config), swarm=configured_swarm(config))
    except CommandError:  # no roster on this machine, as in the operator's pod: nobody's scores can be checked
        reports = None
    return await take_snapshot(config, target, nodes, timeout_s=CONNECT_S, within_s=STATUS_S, evaluations=reports)


def _end_object(end: tuple[Path, RunEnd] | None) -> dict[str, Any] | None:
    """Build the `ended` of `--json`: null while the swarm is running, as far as is known here."""
    if end is None:
        return None
    folder, told = end
    how = "in order" if told.in_order else told.how
    return {"run": folder.name, "how": how, "at": told.at, "cause": told.cause, "code": told.code}


def as_object(snapshot: SwarmState) -> dict[str, Any]:
    """The snapshot as JSON."""
    return {
        "at": snapshot.at,
        "swarm_reachable": snapshot.swarm_reachable,
        "nodes": {node.node: _node_object(node) for node in snapshot.nodes},
        "left_out": snapshot.left_out,
        "of_earlier_runs": list(snapshot.earlier),
        "unreadable_entries": snapshot.unreadable,
        "message_versions": _by_version(snapshot),
        "swarm_streams": [_fill_object(fill) for fill in snapshot.swarm_streams],
    }


def _node_object(node: NodeState) -> dict[str, Any]:
    """A node's object in `--json`; scripts read these keys. Unknown values are null."""
    newest = node.newest_score if node.signed else None
    return {
        "kind": node.kind,
        "step": None if node.elsewhere else node.step,
        "figures_of_step": None if (of := node.newest("trainer", StatusFigure.STEP)) is None else int(of),
        "policy_version": node.version,
        "finished": None if node.elsewhere else node.finished,
        "trouble": []
        if node.elsewhere
        else list(filter(None, [node.unread, *node.absent, *node.trouble, node.unwritten, node.unsaved])),
        "unread_keys": dict(node.surplus),
        "lost_streams": list(node.lost),
        "evaluation": None
        if newest is None
        else {key: getattr(newest, key) for key in ("policy_version", "pass_rate", "mean_reward", "n", "unknown")},
        "evaluation_without_score": node.unscored,
        "unknown_rewards": None if node.elsewhere else node.unknown_rewards,
        "in_directory": node.entry is not None,
        "directory_entry": None
        if node.entry is None
        else {"standing": node.entry.standing.value, "public_key": node.entry.public_key, "problem": node.entry.problem},
        "services": {
            role: [
                {
                    "replica": status.replica,
                    "state": status.state,
                    "age_s": round(max(0.0, node.at - status.updated_at), 1),
                    "alive": status in node.alive(role),
                    "figures": dict(status.figures),
                }
                for status in node.roles(role)
            ]
            for role in ROLES
        },
        "streams": [_fill_object(fill) for fill in node.streams],
        "name_held_by": [{"host": lease.host, "pid": lease.pid, "run": lease.run} for lease in node.held()],
        "unreadable_keys": list(node.unreadable),
    }


def _fill_object(fill: StreamFill) -> dict[str, Any]:
    return {
        "stream": fill.stream,
        "messages": fill.state.messages,
        "size_bytes": fill.state.size_bytes,
        "last_seq": fill.state.last_seq,
        "consumer_pending": fill.consumer.pending if fill.consumer else None,
        "consumer_ack_pending": fill.consumer.ack_pending if fill.consumer else None,
        "consumer_redelivered": fill.consumer.redelivered if fill.consumer else None,
    }


def show(snapshot: SwarmState, console: Console, run: Path | None = None, server: str = "", *, records: Path | None = None) -> None:
    """Print three lines a node, what is wrong and how to mend it, and the streams. run: as
    `folder_here` returns. server: as `server_trouble` returns; it is told instead of each process's
    silence. records: the folder of the run that is shown, running or ended, if it is here.
    """
    for node in snapshot.here:
        console.print(*node_lines(node), sep="\n", soft_wrap=True)
        for words in [*node.verdict[:1], *node.notes]:
            console.print(f"  {visible(node.node)}: {words}", soft_wrap=True, highlight=False)
        for words in set_lines(records / node.node) if records is not None else ():
            console.print(f"  {words}", soft_wrap=True, highlight=False)
        if node.none_taken:
            name = visible(node.node)
            console.print(f"  what {name} is sent is refused: `swarm rollouts {name} --refused` shows each", soft_wrap=True)
    for line in [server] if server else advice(snapshot.here, run):
        console.print(line, highlight=False, soft_wrap=True)
    if elsewhere := [node for node in snapshot.nodes if node.elsewhere]:
        console.print("on other servers", style="bold")
        console.print(elsewhere_table(elsewhere, snapshot.known))
    shared = () if snapshot.alone else snapshot.swarm_streams
    fills = [*(fill for node in snapshot.nodes for fill in node.streams), *shared]
    if fills:
        console.print(_streams(fills))
    for line in [*omissions(snapshot), *_unprotected(snapshot.here), *_clocks(snapshot.here)]:
        console.print(line, soft_wrap=True)
    if words := swarm_trouble(snapshot):
        console.print(words, soft_wrap=True)
    if snapshot.swarm_problem and not snapshot.swarm_denied:
        console.print(visible(snapshot.swarm_problem), highlight=False, soft_wrap=True)


def swarm_trouble(snapshot: SwarmState) -> str:
    """Why the swarm's streams are not shown; empty if they are, or there is no swarm."""
    if snapshot.swarm_denied:
        return "the swarm's streams are not shown: its server refuses this command (nats.swarm_key_file)"
    return "" if snapshot.swarm_reachable is not False else "the swarm plane cannot be reached; nodes train alone until it is back"


def _streams(fills: Sequence[StreamFill]) -> Table:
    table = Table("stream", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("messages", "MiB", "last seq", "pending", "unacked", "redelivered"):
        table.add_column(column, justify="right")
    for fill in fills:
        size_mib = "–" if fill.state.size_bytes is None else f"{fill.state.size_bytes / 2**20:.2f}"
        lag = fill.consumer
        behind = ["–"] * 3 if lag is None else [str(lag.pending), str(lag.ack_pending), str(lag.redelivered)]
        table.add_row(cell(fill.stream), str(fill.state.messages), size_mib, str(fill.state.last_seq), *behind)
    return table


def omissions(snapshot: SwarmState) -> list[str]:
    """Sentences about what the snapshot does not show, and how to see it."""
    lines = []
    if snapshot.earlier:
        lines.append(f"not shown, as earlier runs left them on this server: {_names([visible(name) for name in snapshot.earlier])}")
    if snapshot.left_out:
        lines.append(
            f"{snapshot.left_out:,} more entries in the directory are not shown: name nodes to see them (`swarm status NODE`)"
        )
    if snapshot.unreadable:
        lines.append(f"{snapshot.unreadable:,} unreadable entries in the directory: no honest node of this version writes those")
    lines += [
        f"{_names(names)}: the directory entry is {standing.value}, so anybody may have written it"
        if standing is SignatureStatus.UNSIGNED
        else f"{_names(names)}: the directory entry is refused: `swarm status NODE --json` says why"
        for standing in (SignatureStatus.UNSIGNED, SignatureStatus.REFUSED)
        if (names := [node.node for node in snapshot.nodes if node.entry is not None and node.entry.standing is standing])
    ]
    if words := _other_versions(snapshot):
        lines.append(words)
    keys = sum(len(node.unreadable) for node in snapshot.nodes)
    if keys:
        lines.append(f"{keys:,} unreadable keys in the nodes' buckets: `swarm status --json` names them")
    return lines


def _by_version(snapshot: SwarmState) -> dict[str, int]:
    """Numbers of nodes that share groups of each schema version, by their directory entries."""
    entries = [node.entry for node in snapshot.nodes if node.entry is not None]
    spoken = Counter(each.said.swarm_schema for each in entries if each.standing is SignatureStatus.SIGNED)
    return {str(version): spoken[version] for version in sorted(spoken)}


def _other_versions(snapshot: SwarmState) -> str:
    """Which versions the nodes share groups in; empty if that is this software's alone."""
    spoken = _by_version(snapshot)
    if spoken.keys() <= {str(SWARM_SCHEMA_VERSION)}:
        return ""
    told = ", ".join(f"{count(number, 'node')} of version {version}" for version, number in spoken.items())
    return f"groups are shared by {told}: nodes of two versions do not read each other, so update the older"


def _names(names: list[str]) -> str:
    return ", ".join(names[:NAMES_A_LINE]) + (f" and {len(names) - NAMES_A_LINE} more" if len(names) > NAMES_A_LINE else "")


def _unprotected(nodes: Sequence[NodeState]) -> Iterator[str]:
    """Yield a line for each set of protections that scorers go without, with all nodes of which it
    is true: nodes of one machine lack the same ones.
    """
    lacking: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        figures = {name for status in node.roles("verifier") for name, value in status.figures.items() if value}
        missing = (FigureFamily.SANDBOX_WITHOUT.what(name) for name in figures)
        if without := sorted(name.replace("_", " ") for name in missing if name is not None):
            lacking.setdefault(tuple(without), []).append(visible(node.node))
    for lacks, names in lacking.items():
        whose, where = ("its", "the verifier's log has") if len(names) == 1 else ("their", "the verifiers' logs have")
        yield (
            f"{_names(names)}: {whose} scorers run without these protections: {', '.join(lacks)}; {where} the cause and "
            "the remedy (sandbox_protection_missing)"
        )


def _clocks(nodes: Sequence[NodeState]) -> Iterator[str]:
    """Yield a line for each process whose clock is off."""
    alive = [(node, role, status) for node in nodes for role in ROLES for status in node.alive(role)]
    for node, role, status in alive:
        whose, figures = f"{visible(node.node)}: the {role}", status.figures
        if (ahead_s := figures.get(StatusFigure.CLOCK_AHEAD_S)) is not None:
            off = f"{duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"
            yield f"{whose}'s clock is {off} its NATS server's: nodes refuse each other's groups by their age; set the clock"


# From outside: a swarm as its hub shows it to spectators.


@dataclass(frozen=True, slots=True)
class Hub:
    """Where to look, and as which user. Files are empty if the server asks for none. `swarm`: which
    swarm to look at; None if only an address was given. `roster`: keys by name if the token lists
    members; None: first keys are trusted.
    """

    url: str
    user: str = OBSERVER
    key_file: str = ""
    ca_file: str = ""
    swarm: str | None = None
    roster: Mapping[str, str] | None = None

    async def look(self) -> SwarmState:
        """Connect as this user and look once. Raises the errors of `shared.transport.connect`."""
        transport = await self.connect()
        try:
            return await look_at_hub(transport, EvaluationLog(roster=self.roster, swarm=self.swarm), self.swarm)
        finally:
            await transport.close()

    async def connect(self) -> Transport:
        """Connect as this user."""
        return await connect(
            self.url,
            name="observer",
            timeout_s=HUB_CONNECT_S,
            key_file=self.key_file or None,
            ca_file=self.ca_file or None,
            inbox_prefix=f"_INBOX_{self.user}",
            may_ask=not self.key_file,
            hub=True,
            accounts=(user_account(SWARM_ACCOUNT, self.user),),
        )


def _show_hub(url: str, token: str, key: Path | None, ca: Path | None, *, as_json: bool) -> None:
    """Print one look at a hub. Raises CommandError, with the remedy, if it lets nobody look."""
    with named_hub(url, token, key, ca) as hub:
        try:
            seen = asyncio.run(hub.look())
        except AccessDenied as error:
            remedy = "ask the swarm's operator for a token from `swarm invite --observer`, or give --key and --ca"
            raise CommandError(f"{hub.url} does not admit this spectator: {remedy}\n({error})") from None
        except NotConnected as error:
            raise CommandError(f"{error.cause}: check the address, and whether something on the way blocks its port") from None
    if as_json:
        typer.echo(visible_json(hub_object(seen, hub.url), indent=2))
    else:
        console = terminal()
        console.print(visible(hub.url), highlight=False)
        console.print(elsewhere_table(seen.nodes, seen.known))
        console.print(hub_caption(seen), soft_wrap=True)


@contextmanager
def named_hub(url: str, token: str, key: Path | None = None, ca: Path | None = None) -> Iterator[Hub]:
    """The hub of an address or a token. For the length of the block, a token's key and certificate
    are in files that only their owner can read.
    """
    if url:
        try:
            yield Hub(checked_urls(url), key_file=str(key or ""), ca_file=str(ca or ""))
        except TokenError as error:
            raise CommandError(str(error)) from None
        return
    in_environment = token == "-" and bool(os.environ.get(TOKEN_VARIABLE, "").strip())
    invitation = given_invitation(given_text("" if in_environment else token))
    with TemporaryDirectory(prefix="swarm-status-") as folder:
        yield _invited_hub(invitation, Path(folder), key, ca)


def _invited_hub(invitation: Invitation, folder: Path, key: Path | None, ca: Path | None) -> Hub:
    """The token's hub and roster; without a roster a name belongs to the first key that
    signs it.
    """
    user, key_file, ca_file = OBSERVER, str(key or ""), str(ca or "")
    if invitation.credential is not None and not key:
        user, key_file = invitation.credential.user, str(folder / "key.nk")
        Path(key_file).touch(mode=0o600)
        Path(key_file).write_text(invitation.credential.seed)
    if invitation.authority and not ca:
        ca_file = str(folder / "ca.pem")
        Path(ca_file).write_bytes(invitation.authority)
    roster = {member.node: member.public_key for member in invitation.roster} or None
    return Hub(invitation.url, user, key_file, ca_file, invitation.swarm_id, roster)


def hub_object(seen: SwarmState, url: str) -> dict[str, Any]:
    """A spectator's look as JSON."""
    return {
        "at": seen.at,
        "url": url,
        "nodes": [_spectated_object(node, known=node.node in seen.known) for node in seen.nodes],
        "groups_in_window": seen.groups,
        "left_out": seen.left_out,
        "unreadable_entries": seen.unreadable,
        "message_versions": _by_version(seen),
        "other_swarms_entries": seen.other_swarms,
    }


def _spectated_object(node: NodeState, *, known: bool) -> dict[str, Any]:
    """A node's object in `--json` of a look from outside; whatever it has not reported is null."""
    said = node.entry.said if node.entry is not None else None
    compared = node.comparison
    scores = {
        key: None if score is None else {name: getattr(score, name) for name in ("policy_version", "pass_rate", "n", "mean_reward")}
        for key, score in (("first", compared.alike[0] if compared.alike else None), ("newest", node.newest_score))
    }
    return {
        "node": node.node,
        "model": said.model.name if said else "",
        "tasks": list(said.tasks) if said else [],
        "policy_version": said.policy_version if said else None,
        "seen_s": max(0.0, node.at - said.updated_at) if said else None,
        **scores,
        "gain": compared.gain,
        "shared": node.shared_window,
        "signed": node.signed,
        "known": known,
    }


def hub_caption(seen: SwarmState) -> str:
    """A line about what the table shows and what it leaves out."""
    groups = "" if seen.groups is None else f" groups in the hub's window: {seen.groups:,};"
    parts = [f"nodes: {len(seen.nodes)};{groups} held-out: pass rate (r: mean reward) / number of tasks, as each node reports"]
    if not seen.nodes:
        parts = [] if seen.swarm_problem else ["no node has joined yet"]
    if seen.left_out:
        parts.append(f"{seen.left_out:,} more nodes are not shown")
    if seen.other_swarms:
        parts.append(f"{seen.other_swarms:,} entries are signed for other swarms: a token chooses the swarm")
    if seen.unreadable:
        parts.append(f"{seen.unreadable:,} unreadable entries in the directory")
    if seen.swarm_problem:
        parts.append(visible(seen.swarm_problem))
    if words := _other_versions(seen):
        parts.append(words)
    return "; ".join(parts)
