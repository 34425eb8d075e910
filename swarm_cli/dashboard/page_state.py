"""The data of the page: one object of bounded size for its first view, from the results of a look.
Held-out scores tell whether a model gets better, compared only within the same held-out set.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.contracts.wire import is_node_name
from shared.identity.statements import SignatureStatus
from shared.roles import ROLES, Role
from shared.text import visible
from swarm_cli.dashboard.recent_groups import RecentGroups
from swarm_cli.dashboard.run_records import TrainedGroups, as_shown
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.installation import shown
from swarm_cli.observe.evaluation_log import with_places
from swarm_cli.observe.node_lines import last_evaluation
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.remedies import Deceased, dying
from swarm_cli.observe.run_files import Comparison, HeldOutSet, thinned
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.observe.verdict import held_out_verdict
from swarm_cli.runs import restart_options, starts_again

CURVE_POINTS = 24
"""Points of a node's curve in the table; the node's page has all that are kept."""
THIS_SERVER = "this server's own"
"""Standing of a score from the node plane, where no signature is needed."""
ON_RECORD = "on record"
"""Standing of a score from the records of a run that has ended."""


def leaderboard(nodes: Iterable[NodeState], known: Collection[str] = ()) -> list[tuple[NodeState, Comparison]]:
    """The nodes that have a held-out score, with what their newest one is compared with: by
    held-out set, that with most nodes first, and within a set by gain; nodes whose scores anybody
    may have written come last. `known`: nodes that count before all others, so that a crowd of
    invented nodes cannot put its set on top.
    """
    rows = [(node, found) for node in nodes if (found := node.comparison).newest is not None]
    by_set, those_known = Counter[HeldOutSet](), Counter[HeldOutSet]()
    for node, found in rows:
        if node.signed and found.newest is not None:
            by_set[found.newest.held_out_set] += 1
            those_known[found.newest.held_out_set] += node.node in known

    def rank(row: tuple[NodeState, Comparison]) -> tuple[Any, ...]:
        node, found = row
        of_set = found.alike[-1].held_out_set
        gain = 2.0 if found.gain is None else -found.gain
        return not node.signed, -those_known[of_set], -by_set[of_set], of_set, gain, -(found.alike[-1].score or 0.0), node.node

    return sorted(rows, key=rank)


NODES_SENT = 200
ROWS_SENT = 200
CELLS_SENT = 1500
GROUPS_SENT = 30
TASKS_SENT = 8
TASK_CHARACTERS = 80
"""Room for a file's name with what tells it from others, which comes last."""
NOTHING_TRAINED = TrainedGroups()
DYING_SHOWN = ("running", "starting", "silent")
"""The kinds of node whose processes that die are told of."""
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets this variable in every container."""


def swarm_object(
    swarm: SwarmState,
    recent: RecentGroups,
    trained: TrainedGroups = NOTHING_TRAINED,
    names: FileNames = UNNAMED,
    *,
    ended: bool = False,
    run: Path | None = None,
) -> dict[str, Any]:
    """The first view's data. At most about 150 kB of JSON, however large the swarm is. names: of
    the files that are datasets. ended: the run has ended, and all of this is from its records. run:
    its folder, if it is running on this machine.
    """
    # A look at an empty server lists the configuration's node, although it has never been seen.
    deaths = dying(swarm.here, run)
    nodes = [
        _node(node, names, deaths, run)
        for node in swarm.nodes
        if node.statuses or node.unknown or node.entry is not None or node.lost
    ]
    here = {node["node"] for node in nodes if node["kind"] != "elsewhere"}
    known = here.union(swarm.known)
    rows = leaderboard(swarm.nodes, known)
    shown_nodes = with_places(nodes, NODES_SENT, lambda node: node["node"] in known)
    shown_rows = with_places(rows, ROWS_SENT, lambda row: row[0].signed and row[0].node in known)
    cells, fewest = trained.cells[:CELLS_SENT], trained.cells[CELLS_SENT:]
    return {
        "at": swarm.at,
        "state": overall([node["kind"] for node in nodes]),
        "swarm": swarm.swarm,
        "swarm_reachable": swarm.swarm_reachable,
        "swarm_problem": "" if swarm.swarm_denied else visible(swarm.swarm_problem, 300),
        "cluster": IN_CLUSTER in os.environ,
        "nodes": shown_nodes,
        "nodes_left_out": swarm.left_out + len(nodes) - len(shown_nodes),
        "unreadable": swarm.unreadable,
        "earlier": [visible(name, 40) for name in swarm.earlier[:NODES_SENT]],
        "leaderboard": [_row_object(*row, ended=ended) for row in shown_rows],
        "rows_left_out": len(rows) - len(shown_rows),
        "exchange": [[cell.taker, cell.sender, names.shown(cell.dataset), cell.groups] for cell in cells],
        "exchange_since": dict(list(trained.since.items())[:NODES_SENT]),
        "exchange_uncounted": trained.uncounted[:NODES_SENT],
        "exchange_left_out": trained.left_out + sum(cell.groups for cell in fewest),
        "batches": recent.batches,
        "groups": [group.card(names) for group in recent.recent(GROUPS_SENT)],
    }


def overall(kinds: Sequence[str]) -> str:
    """The swarm's state, from those of its nodes on this server: `empty`, `starting`, `running`,
    `finished`, `stopped`, `emptied`, `unread` or `failed`.
    """
    here = [kind for kind in kinds if kind != "elsewhere"]
    if not here:
        return "running" if kinds else "empty"
    for kind, state in (("lost", "emptied"), ("silent", "failed")):
        if kind in here:
            return state
    for kind in ("running", "starting", "unread"):
        if kind in here:
            return kind
    return "finished" if all(kind == "finished" for kind in here) else "stopped"


def _node(node: NodeState, names: FileNames, deaths: Mapping[str, Deceased], run: Path | None) -> dict[str, Any]:
    """One node's data. Its own words are untrusted text, so they are escaped and cut; `entry` says
    whether its key signed them.
    """
    entry, kind = node.entry, node.kind
    own = {role: deaths[f"{node.node}-{role}"] for role in ROLES if f"{node.node}-{role}" in deaths and kind in DYING_SHOWN}
    words = {"finished": last_evaluation(node), "elsewhere": "", "stopped": ", ".join(node.absent)}.get(kind, node.words)
    away = node.gone if kind == "silent" else node.late if kind == "running" else []
    if given_up := [role for role, each in own.items() if each.given_up]:
        kind, words = "silent", ""
        away = [*away, *(role for role in given_up if role not in away)]
    words = ", ".join(filter(None, [words, *(f"{role} {each.words}" for role, each in own.items())]))
    trouble = "unanswered" if node.late else "unscored" if node.none_scored else "still" if node.trouble else "dying" if own else ""
    return {
        "node": visible(node.node, 40),
        "kind": kind,
        "words": visible(words, 300 if own else 120),
        "trouble": trouble if kind == "running" else "",
        "notes": [visible(words, 300) for words in node.notes],
        "away": [_away(node.node, role, own.get(role), run) for role in away],
        "step": node.step,
        "steps": node.max_steps,
        "pace": None if (pace := node.steps_per_minute) is None else round(pace, 3),
        "version": node.version or (entry.said.policy_version if entry else 0),
        "model": visible(entry.said.model.name, 60) if entry else "",
        "tasks": [visible(names.shown(task), TASK_CHARACTERS) for task in entry.said.tasks[:TASKS_SENT]] if entry else [],
        "tasks_left_out": len(entry.said.tasks[TASKS_SENT:]) if entry else 0,
        "entry": entry.standing.value if entry else "none",
        "problem": entry.problem if entry else "",
        "key": visible(entry.said.public_key, 12) if entry else "",
        "heard_s": round(max(0.0, node.at - entry.said.updated_at)) if entry else None,
    }


def _away(node: str, role: Role, died: Deceased | None, run: Path | None) -> dict[str, str]:
    """A process that does not answer; of a run on this machine with its log, and what starts it
    again.
    """
    process = visible(f"{node}-{role}", 50)
    if run is None or not is_node_name(node):
        return {"process": process, "log": "", "again": ""}
    file = run / node / f"{role}.log"
    starting = died is not None and not died.given_up
    again = f"{process}: {died.words}" if died is not None and starting else starts_again(process, restart_options(run))
    return {"process": process, "log": str(shown(file)) if file.is_file() else "", "again": again}


def _row_object(node: NodeState, found: Comparison, *, ended: bool) -> dict[str, Any]:
    """One row's data, rounded to the precision that is drawn, so that a hundred curves stay small.
    A point of the curve: version, score, of how many answers it is, and how many of them pass.
    """
    newest, entry = found.alike[-1], node.entry
    outcome, words, chance, pairs = held_out_verdict(node.scores)
    best = max(reversed(found.values), key=lambda each: each[1], default=None)  # of equal ones the newest
    own = THIS_SERVER if node.evaluation is not None else "signed"
    standing = ON_RECORD if ended else own if node.signed else "unsigned"
    held_out, scorer, n = newest.held_out_set
    passes = {each.policy_version: None if each.pass_rate is None else round(each.pass_rate * each.n) for each in found.alike}
    points = [(each.policy_version, as_shown(value), each.n, passes[each.policy_version]) for each, value in found.values]
    return {
        "node": node.node,
        "key": visible(entry.public_key or "", 64) if entry is not None and entry.standing is SignatureStatus.SIGNED else "",
        "standing": standing,
        "trusted": node.signed,
        "set": held_out[:12],
        "scorer": scorer[:8],
        "n": n,
        "unknown": newest.unknown,
        "by_reward": newest.pass_rate is None,
        "base": None if found.base is None or found.base.score is None else as_shown(found.base.score),
        "newest": as_shown(newest.score or 0.0),
        "gain": None if found.gain is None else as_shown(found.gain),
        "version": newest.policy_version,
        "best": None if best is None else [best[0].policy_version, as_shown(best[1]), best[0].n, passes[best[0].policy_version]],
        "mean": None if newest.mean_reward is None else as_shown(newest.mean_reward),
        "outcome": outcome.value,
        "words": visible(words, 300),
        "chance": None if chance is None else as_shown(chance),
        "changed": None if pairs is None or pairs.p is None else [pairs.newly_right, pairs.lost],
        "curve": thinned(points, CURVE_POINTS),
    }
