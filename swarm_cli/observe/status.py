"""`swarm status`: the nodes, their progress, and how full the streams are.

| exit code | |
|---|---|
| 0 | the swarm is running: at least one of its processes is alive |
| 1 | no server answers, no service has written to it, or it has no node of a given name |
| 2 | the command was called wrongly |
| 3 | the run has ended in order |
| 4 | the run has failed, or was killed |
| 78 | the configuration cannot be used |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shared.config import NodeConfig
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.identity.statements import Standing
from shared.roles import ROLES
from shared.runtime.status import STARTING, STOPPED
from shared.text import visible, visible_json
from shared.transport.base import ConsumerState, NotConnected
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import cell, note, terminal
from swarm_cli.errors import CommandError
from swarm_cli.observe.evaluation_log import EvaluationLog, configured_swarm, roster_of
from swarm_cli.observe.node_state import (
    NodeView,
    absent,
    duration,
    finished,
    instead_of_state,
    mostly_refused,
    none_taken,
    reward_notes,
    trouble,
    unknown_rewards,
)
from swarm_cli.observe.remedies import advice, folder_here, server_trouble
from swarm_cli.observe.run_files import Evaluation
from swarm_cli.observe.snapshot import (
    NO_STATUS,
    NOBODY,
    START,
    NodeSnapshot,
    StreamFill,
    SwarmSnapshot,
    ended_run,
    take_snapshot,
    with_reports,
)
from swarm_cli.runs import RunEnd, afterwards, newest_ended
from swarm_cli.server_diagnosis import silent_server
from swarm_cli.target import LookRunOption, Target, check_listening, ended_here, looking_at, run_here

NAMES_A_LINE = 5


def status(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="NODE", help="Nodes to show.  [default: all found]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    run: LookRunOption = "",
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Show nodes, policy versions, stream fill and consumer lag. Exit code 1: no service has
    reported; 3: the run has ended in order; 4: it failed or was killed.
    """
    node_config = load_chosen(config)
    with looking_at(node_config, run, node_url, swarm_url) as target:
        try:
            check_listening(node_config.node.var_dir, target)
            snapshot = asyncio.run(_snapshot(node_config, target, nodes or []))
        except NotConnected:
            if silent_server(node_config.node.var_dir, target.node_url):
                raise
            # When a run on this machine ends, its server ends too.
            ended = ended_here(node_config.node.var_dir, target)
            if ended is None or run:
                raise
            raise _gone(*ended, as_json=as_json) from None
    end = _end_of(node_config, target, snapshot)
    server = "" if end is not None else server_trouble(snapshot.here, snapshot.at, node_config.node.var_dir, target)
    if as_json:
        typer.echo(visible_json(as_object(snapshot) | {"server_problem": server, "ended": _end_object(end)}, indent=2))
    else:
        if end is not None:
            note(end[1].sentence(end[0], time.time()))
        show(snapshot, terminal(), folder_here(node_config.node.var_dir, target), server)
    if end is not None:
        raise typer.Exit(end[1].exit_code)
    if not any(view.statuses or (nodes and view.elsewhere) for view in snapshot.nodes):
        if as_json:
            raise typer.Exit(1)
        raise CommandError(f"{NO_STATUS if snapshot.nodes else NOBODY}: {START}")


async def _snapshot(config: NodeConfig, target: Target, nodes: list[str]) -> SwarmSnapshot:
    if target.ended is not None:
        return ended_run(config.node.var_dir / "runs" / target.run, target.ended, nodes)
    try:
        reports = EvaluationLog(roster=roster_of(config), swarm=configured_swarm(config))
    except CommandError:  # no roster on this machine, as in the operator's pod: nobody's scores can be checked
        reports = None
    run = run_here(config.node.var_dir, target)
    snapshot = await take_snapshot(
        config, target.node_url, target.swarm_url, nodes, timeout_s=5.0, evaluations=reports, run=run, swarm_id=target.swarm_id
    )
    return snapshot if reports is None else with_reports(snapshot, reports)


def _end_of(config: NodeConfig, target: Target, snapshot: SwarmSnapshot) -> tuple[str, RunEnd] | None:
    """The run that is looked at, and its end; None if a process is alive. On a server that outlives
    its runs, it is the last run of this machine.
    """
    if target.ended is not None:
        return target.run, target.ended
    if any(node.view.alive(role, snapshot.at) for node in snapshot.nodes for role in ROLES):
        return None
    found = newest_ended(config.node.var_dir, target.node_url)
    return (found[0].name, found[1]) if found else None


def _gone(folder: Path, end: RunEnd, *, as_json: bool) -> Exception:
    """The exception that ends `status` if the newest run here has ended, and its server with it."""
    if as_json:
        typer.echo(visible_json({"at": time.time(), "nodes": {}, "ended": _end_object((folder.name, end))}, indent=2))
        return typer.Exit(end.exit_code)
    return CommandError(
        f"{end.sentence(folder.name, time.time())}\n{afterwards(folder, 'swarm status')}",
        end.exit_code,
    )


def _end_object(end: tuple[str, RunEnd] | None) -> dict[str, Any] | None:
    """What `--json` prints under `ended`: null while the swarm is running, as far as is
    known here.
    """
    if end is None:
        return None
    run, told = end
    how = {"complete": "in order", "stopped": "in order"}.get(told.how, told.how)
    return {"run": run, "how": how, "at": told.at, "cause": told.cause, "code": told.code}


def as_object(snapshot: SwarmSnapshot) -> dict[str, Any]:
    """The snapshot as JSON."""
    return {
        "at": snapshot.at,
        "swarm_reachable": snapshot.swarm_reachable,
        "nodes": {node.node: _node_object(node, snapshot.at) for node in snapshot.nodes},
        "left_out": snapshot.left_out,
        "of_earlier_runs": list(snapshot.earlier),
        "unreadable_entries": snapshot.unreadable,
        "swarm_streams": [_fill_object(fill) for fill in snapshot.swarm_streams],
    }


def _node_object(node: NodeSnapshot, at: float) -> dict[str, Any]:
    """What `--json` prints about a node; scripts read these keys. Unknown values are null."""
    view = node.view
    return {
        "step": node.step,
        "policy_version": node.version,
        "finished": None if node.elsewhere else finished(view),
        "trouble": [] if node.elsewhere else [*absent(view, at), *trouble(view, at)],
        "evaluation": None
        if view.evaluation is None
        else {key: getattr(view.evaluation, key) for key in ("policy_version", "pass_rate", "mean_reward", "n", "unknown")},
        "unknown_rewards": None if node.elsewhere else unknown_rewards(view),
        "in_directory": node.in_directory,
        "directory_entry": None
        if node.entry is None
        else {"standing": node.entry.standing.value, "public_key": node.entry.public_key, "problem": node.entry.problem},
        "services": {
            role: [
                {
                    "replica": status.replica,
                    "state": status.state,
                    "age_s": round(max(0.0, at - status.updated_at), 1),
                    "alive": status in view.alive(role, at),
                    "figures": dict(status.figures),
                }
                for status in view.roles(role)
            ]
            for role in ROLES
        },
        "streams": [_fill_object(fill) for fill in node.streams],
        "name_held_by": [{"host": lease.host, "pid": lease.pid, "run": lease.run} for lease in view.held(at)],
        "unreadable_keys": list(view.unreadable),
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


def show(snapshot: SwarmSnapshot, console: Console, run: Path | None = None, server: str = "") -> None:
    """Print the tables, without those in which there would be nothing. run: as `folder_here`
    returns. server: as `server_trouble` returns; it is told instead of each process's silence.
    """
    nodes = Table("node", "step", "version", "held-out", *ROLES, title="nodes", title_justify="left")
    for node in snapshot.nodes:
        evaluation = node.view.evaluation
        held_out = f"{Evaluation.of(evaluation)} @{evaluation.policy_version}" if evaluation else "–"
        if evaluation and evaluation.unknown:
            held_out += f", {evaluation.n} of {evaluation.n + evaluation.unknown}"
        roles = [cell(_role_cell(node, role, snapshot.at)) for role in ROLES]
        nodes.add_row(cell(node.node), _known(node.step), _known(node.version), held_out, *roles)
    if snapshot.nodes:
        console.print(nodes)
    for node in snapshot.nodes:
        if elsewhere := node.held_on(snapshot.at):
            console.print(visible(f"{node.node}: another machine holds this name: {', '.join(elsewhere)}"), markup=False)
        gone = [] if node.elsewhere else absent(node.view, snapshot.at)
        for words in () if server else (*gone, *trouble(node.view, snapshot.at)):
            console.print(f"{visible(node.node)}: {words}", markup=False)
        for words in reward_notes(node.view):
            console.print(f"{visible(node.node)}: {words}", markup=False, soft_wrap=True)
        if none := "" if finished(node.view) else none_taken(node.view, snapshot.at):
            console.print(_none_taken(node.view, none, snapshot.at), markup=False, soft_wrap=True)
    if server:
        console.print(server, markup=False, highlight=False, soft_wrap=True)
    else:
        for line in advice(snapshot.here, snapshot.at, run):
            console.print(line, markup=False)
    columns = ("stream", "messages", "MiB", "last seq", "pending", "unacked", "redelivered")
    streams = Table(*columns, title="streams", title_justify="left")
    for fill in [*(fill for node in snapshot.nodes for fill in node.streams), *snapshot.swarm_streams]:
        size_mib = "–" if fill.state.size_bytes is None else f"{fill.state.size_bytes / 2**20:.2f}"
        streams.add_row(cell(fill.stream), str(fill.state.messages), size_mib, str(fill.state.last_seq), *_lag_cells(fill.consumer))
    if streams.row_count:
        console.print(streams)
    for line in omissions(snapshot):
        console.print(line)
    for line in [*_unprotected(snapshot.nodes), *_unwritten(snapshot.nodes, snapshot.at)]:
        console.print(line, markup=False)
    if snapshot.swarm_denied:
        console.print("the swarm's streams are not shown: its server refuses this command (nats.swarm_key_file)", markup=False)
    elif snapshot.swarm_reachable is False:
        console.print("the swarm plane cannot be reached; nodes train alone until it is back")
        console.print(visible(snapshot.swarm_problem), markup=False, highlight=False, soft_wrap=True)


def _none_taken(view: NodeView, words: str, at: float) -> str:
    """none_taken's `words` with the reason, and where each refused group's is."""
    node = visible(view.node)
    reason = mostly_refused(view, at)
    why = f", those examined mostly for {visible(reason, 40)}" if reason else ""
    return f"{node}: {words}: what it is sent is refused{why} (`swarm rollouts {node} --refused`)"


def omissions(snapshot: SwarmSnapshot) -> list[str]:
    """What the snapshot does not show, and how to see it."""
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
        if standing is Standing.UNSIGNED
        else f"{_names(names)}: the directory entry is refused: `swarm status NODE --json` says why"
        for standing in (Standing.UNSIGNED, Standing.REFUSED)
        if (names := [node.node for node in snapshot.nodes if node.entry is not None and node.entry.standing is standing])
    ]
    keys = sum(len(node.view.unreadable) for node in snapshot.nodes)
    if keys:
        lines.append(f"{keys:,} unreadable keys in the nodes' buckets: `swarm status --json` names them")
    return lines


def _names(names: list[str]) -> str:
    return ", ".join(names[:NAMES_A_LINE]) + (f" and {len(names) - NAMES_A_LINE} more" if len(names) > NAMES_A_LINE else "")


def _unprotected(nodes: Sequence[NodeSnapshot]) -> Iterator[str]:
    """A line for each set of protections that scorers go without, with all nodes of which it is
    true: nodes of one machine lack the same ones.
    """
    lacking: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        if missing := _missing_protections(node):
            lacking.setdefault(tuple(missing), []).append(visible(node.node))
    for without, names in lacking.items():
        whose, where = ("its", "the verifier's log has") if len(names) == 1 else ("their", "the verifiers' logs have")
        yield (
            f"{_names(names)}: {whose} scorers run without these protections: {', '.join(without)}; {where} the cause and "
            "the remedy (sandbox_protection_missing)"
        )


def _unwritten(nodes: Sequence[NodeSnapshot], at: float) -> Iterator[str]:
    """A line for each thing that a process cannot write, and for storage that is slow."""
    alive = [(node, role, status) for node in nodes for role in ROLES for status in node.view.alive(role, at)]
    for node, role, status in alive:
        whose, figures = f"{visible(node.node)}: the {role}", status.figures
        for figure, since in sorted(figures.items()):
            if (kind := FigureFamily.FAILING_SINCE.what(figure)) is not None:
                tries = figures.get(FigureFamily.WRITE_FAILURES.of(kind), 0.0)
                yield (
                    f"{whose} cannot write: {visible(kind, 20).replace('_', ' ')}, for {duration(at - since)} "
                    f"({tries:,.0f} failed writes); its log has the cause and the remedy (write_failed)"
                )
        if (sync_s := figures.get(StatusFigure.DISK_SYNC_S)) is not None:
            yield f"{whose}'s disk is slow: a sync takes {sync_s:.2f} s; its log has the remedy (disk_slow)"
        if (store_s := figures.get(StatusFigure.NATS_STORE_S)) is not None:
            yield f"{whose}'s NATS server stores slowly: {store_s:.2f} s a message; the log has the remedy (nats_storage_slow)"


def _missing_protections(node: NodeSnapshot) -> list[str]:
    figures = {name for status in node.view.roles("verifier") for name, value in status.figures.items() if value}
    missing = (FigureFamily.SANDBOX_WITHOUT.what(name) for name in figures)
    return sorted(name.replace("_", " ") for name in missing if name is not None)


def _lag_cells(consumer: ConsumerState | None) -> list[str]:
    if consumer is None:
        return ["–"] * 3
    return [str(consumer.pending), str(consumer.ack_pending), str(consumer.redelivered)]


def _known(value: int | None) -> str:
    return "–" if value is None else str(value)


def _role_cell(node: NodeSnapshot, role: str, at: float) -> str:
    """What a node's processes of a role do; of a node on another server it is not known."""
    if node.elsewhere:
        return "–"
    alive = node.view.alive(role, at)
    if alive:
        state = instead_of_state(node.view, alive[0], at) or alive[0].state
        return state + (f" x{len(alive)}" if len(alive) > 1 else "")
    known = node.view.roles(role)
    if node.view.starting(role, at):
        return STARTING
    if not known:
        return "never seen"
    ago = duration(at - known[0].updated_at)
    return f"ended {ago} ago" if known[0].state == STOPPED else f"not answering for {ago}"
