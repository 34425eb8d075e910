"""The data of the page's first view: one object of bounded size, from the results of a
look. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shared.contracts.control import EvalReport
from shared.identity.statements import Heard
from shared.roles import ROLES, Role
from shared.runtime.status import STOPPED
from shared.text import cut_text, visible
from swarm_cli.dashboard.leaderboard import ON_RECORD, THIS_SERVER, Row, leaderboard
from swarm_cli.dashboard.recent_groups import RecentGroup, RecentGroups
from swarm_cli.dashboard.trained_groups import TrainedGroups
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.observe.kept_names import with_places
from swarm_cli.observe.progress import state as node_words
from swarm_cli.observe.recorded_scores import NO_NODES, ByNode
from swarm_cli.observe.snapshot import NodeSnapshot, SwarmSnapshot
from swarm_cli.observe.standing import ended_a_moment_ago, gone, late_with_word, reward_notes, standing, trouble

NODES_SENT = 200
ROWS_SENT = 200
CELLS_SENT = 1500
GROUPS_SENT = 30
TASKS_SENT = 8
TASK_CHARACTERS = 80
"""Room for a file's name with what tells it from others, which comes last."""


NOTHING_TRAINED = TrainedGroups()


def swarm_object(
    snapshot: SwarmSnapshot,
    heard: Sequence[Heard[EvalReport]],
    recent: RecentGroups,
    trained: TrainedGroups = NOTHING_TRAINED,
    recorded: ByNode = NO_NODES,
    names: FileNames = UNNAMED,
    *,
    ended: bool = False,
) -> dict[str, Any]:
    """The first view's data. At most about 150 kB of JSON, however large the swarm is. names: of
    the files that are datasets. ended: the run has ended, and all of this is from its records.
    """
    # A look at an empty server lists the configuration's node, although it has never been seen.
    nodes = [_node(node, snapshot.at, names) for node in snapshot.nodes if node.statuses or node.in_directory]
    here = {node["node"] for node in nodes if node["kind"] != "elsewhere"}
    known = here.union(snapshot.known)
    if ended:
        own = [report for sets in recorded.values() for each in sets.values() for report in each.every]
    else:
        own = [node.view.evaluation for node in snapshot.nodes if node.view.evaluation is not None]
    rows = leaderboard(heard, own, known, recorded, ON_RECORD if ended else THIS_SERVER)
    shown_nodes = with_places(nodes, NODES_SENT, lambda node: node["node"] in known)
    shown_rows = with_places(rows, ROWS_SENT, lambda row: row.trusted and row.node in known)
    cells, fewest = trained.cells[:CELLS_SENT], trained.cells[CELLS_SENT:]
    return {
        "at": snapshot.at,
        "state": overall([node["kind"] for node in nodes]),
        "swarm": snapshot.swarm,
        "swarm_reachable": snapshot.swarm_reachable,
        "nodes": shown_nodes,
        "nodes_left_out": snapshot.left_out + len(nodes) - len(shown_nodes),
        "unreadable": snapshot.unreadable,
        "earlier": [visible(name, 40) for name in snapshot.earlier[:NODES_SENT]],
        "leaderboard": [_row(row) for row in shown_rows],
        "rows_left_out": len(rows) - len(shown_rows),
        "exchange": [[cell.taker, cell.sender, names.shown(cell.dataset), cell.groups] for cell in cells],
        "exchange_since": dict(list(trained.since.items())[:NODES_SENT]),
        "exchange_uncounted": dict(list(trained.uncounted.items())[:NODES_SENT]),
        "exchange_left_out": trained.left_out + sum(cell.groups for cell in fewest),
        "batches": recent.batches,
        "groups": [recent_object(group, names) for group in recent.recent(GROUPS_SENT)],
    }


def recent_object(group: RecentGroup, names: FileNames = UNNAMED) -> dict[str, Any]:
    """One line of the list of texts."""
    texts = {"question": cut_text(group.question, 240), "best": cut_text(group.best, 120)}
    return asdict(group) | texts | {"dataset": names.shown(group.dataset)}


def overall(kinds: Sequence[str]) -> str:
    """The swarm's state, from those of its nodes on this server: `empty`, `starting`, `running`,
    `finished`, `stopped` or `failed`.
    """
    here = [kind for kind in kinds if kind != "elsewhere"]
    if not here:
        return "running" if kinds else "empty"
    if "silent" in here:
        return "failed"
    for kind in ("running", "starting"):
        if kind in here:
            return kind
    return "finished" if all(kind == "finished" for kind in here) else "stopped"


def kind_of(node: NodeSnapshot, now: float) -> str:
    """A node's state: `elsewhere` (its processes use another server), `finished`, `stopped` (its
    processes ended in order, or the first of them a moment ago), `starting` (also again), `silent`
    (a process fell silent without ending in order, or did not come back), `running`.
    """
    view = node.view
    if not view.statuses:
        return "elsewhere"
    alive = [role for role in ROLES if view.alive(role, now)]
    newest = [view.roles(role)[0] for role in ROLES if view.roles(role)]
    if view.position is not None and view.position.finished and (alive or all(each.state == STOPPED for each in newest)):
        return "finished"
    if len(alive) < len(ROLES):
        missing = [role for role in ROLES if role not in alive]
        if all(view.starting(role, now) for role in missing):
            return "starting"
        if all(each.state == STOPPED for each in newest) and not alive:
            return "stopped"
        if gone(view, now):
            return "silent"
        return "stopped" if alive and ended_a_moment_ago(view, now) else "starting"
    return "running" if view.step > 0 or standing(view, now) is not None else "starting"


def _node(node: NodeSnapshot, now: float, names: FileNames) -> dict[str, Any]:
    """One node's data. Its own words are untrusted text, so they are escaped and cut; `entry` says
    whether its key signed them.
    """
    entry = node.entry
    kind = kind_of(node, now)
    return {
        "node": visible(node.node, 40),
        "kind": kind,
        "words": visible(_words(node, kind, now), 80),
        "trouble": _trouble(node, kind, now),
        "rewards": [visible(words, 200) for words in reward_notes(node.view)],
        "away": [{"process": visible(f"{node.node}-{role}", 50), "log": "", "again": ""} for role in away(node, kind, now)],
        "step": node.view.step,
        "version": node.view.version or (entry.said.policy_version if entry else 0),
        "model": visible(entry.said.model.name, 60) if entry else "",
        "tasks": [visible(names.shown(task), TASK_CHARACTERS) for task in entry.said.tasks[:TASKS_SENT]] if entry else [],
        "tasks_left_out": len(entry.said.tasks[TASKS_SENT:]) if entry else 0,
        "entry": entry.standing.value if entry else "none",
        "problem": entry.problem if entry else "",
        "key": visible(entry.said.public_key, 12) if entry else "",
        "heard_s": round(max(0.0, now - entry.said.updated_at)) if entry else None,
    }


def away(node: NodeSnapshot, kind: str, now: float) -> list[Role]:
    """The roles that do not answer: gone, or late with their word."""
    if kind == "silent":
        return gone(node.view, now)
    return late_with_word(node.view, now) if kind == "running" else []


def _trouble(node: NodeSnapshot, kind: str, now: float) -> str:
    """`unanswered`: a running node's process is late with its word; `still`: its work does not go
    on; empty: neither.
    """
    if kind != "running" or not trouble(node.view, now):
        return ""
    return "unanswered" if late_with_word(node.view, now) else "still"


def _words(node: NodeSnapshot, kind: str, now: float) -> str:
    """Details beyond the node's state. The progress view regards a node without any answer as
    starting; here it is known to be silent.
    """
    view = node.view
    if kind == "silent":
        away = gone(view, now)
        since = max((status.updated_at for role in away for status in view.roles(role)), default=view.life_began)
        return f"no word from {', '.join(away)} for {max(0.0, now - since):.0f} s"
    if kind == "stopped" and (still := [role for role in ROLES if view.alive(role, now)]):
        return f"still running: {', '.join(still)}"
    return node_words(view, now) if kind in ("running", "starting") else ""


def _row(row: Row) -> dict[str, Any]:
    """One row's data, rounded to the precision that is drawn, so that a hundred curves
    stay small.
    """
    return {
        "node": row.node,
        "key": visible(row.public_key, 64),
        "standing": row.standing,
        "problem": row.problem,
        "trusted": row.trusted,
        "set": row.held_out[:12],
        "n": row.n,
        "unknown": row.unknown,
        "by_reward": row.by_reward,
        "base": row.base,
        "newest": round(row.newest, 4),
        "gain": None if row.gain is None else round(row.gain, 4),
        "version": row.policy_version,
        "at": row.at,
        "curve": [[version, round(rate, 3)] for version, rate in row.curve],
    }
