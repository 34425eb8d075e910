"""The data of the page's first view: one object of bounded size, from the results of a look. How
much each node learned is told by held-out scores, compared only within the same held-out set.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from shared.contracts.control import EvalReport, TaskScore, incomparable
from shared.contracts.wire import is_node_name
from shared.identity.statements import Heard, SignatureStatus
from shared.roles import ROLES, Role
from shared.text import cut_text, visible
from swarm_cli.dashboard.recent_groups import RecentGroup, RecentGroups
from swarm_cli.dashboard.run_records import TrainedGroups
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.installation import shown
from swarm_cli.observe.evaluation_log import with_places
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.remedies import Deceased, dying
from swarm_cli.observe.run_files import Evaluation, HeldOutSet, base_of
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.runs import restart_options, starts_again

CURVE_POINTS = 24
"""Points of a node's curve in the table; the node's page has all that are kept."""
SETS_A_KEY = 2
"""How many of the newest held-out sets that a key reported on are shown: after a change of set the
previous one stays visible, and no key can fill the table with invented sets.
"""
THIS_SERVER = "this server's own"
"""SignatureStatus of a score from the node plane, where no signature is needed."""
ByNode = Mapping[str, Sequence[Evaluation]]
"""Evaluations of each node, in order."""
NO_NODES: ByNode = {}
ON_RECORD = "on record"
"""SignatureStatus of a score from the records of a run that has ended."""


@dataclass(frozen=True, slots=True)
class Row:
    """One key's scores on one held-out set: pass rates, or mean rewards (`by_reward`) where the
    newest report has no pass. `base` is the score of version 0 on the same set, and `gain` the
    newest minus that; None if it is not known or cannot be compared. `trusted`: the row may be
    ranked.
    """

    node: str
    public_key: str
    standing: str
    problem: str
    of_set: HeldOutSet
    base: float | None
    newest: float
    policy_version: int
    at: float
    curve: tuple[tuple[int, float], ...]
    trusted: bool
    by_reward: bool = False
    unknown: int = 0
    """Of the `n` answers to the set, those of the newest report whose reward is unknown."""

    @property
    def gain(self) -> float | None:
        """Newest score minus the base policy's."""
        return None if self.base is None else self.newest - self.base


def leaderboard(
    heard: Iterable[Heard[EvalReport]],
    own: ByNode = NO_NODES,
    known: Collection[str] = (),
    recorded: ByNode = NO_NODES,
    own_standing: str = THIS_SERVER,
) -> list[Row]:
    """Rows by held-out set, the set with most nodes first, and within a set by gain; rows that may
    not be ranked come last. Each key has its newest `SETS_A_KEY` sets. `own`: evaluations of nodes
    on this server, shown if the swarm has none of theirs. `known`: nodes that count before all
    others, so that a crowd of invented nodes cannot put its set on top. `recorded`: what the nodes
    have on record, for the base policy's score if a row that may be ranked lacks it.
    """
    by_key: dict[tuple[str, str, str, str, bool], list[Evaluation]] = {}
    for each in heard:
        key = (each.said.node, each.public_key or "", each.standing.value, each.problem, each.standing is SignatureStatus.SIGNED)
        by_key.setdefault(key, []).append(Evaluation.of(each.said))
    told = {node for node, *_, trusted in by_key if trusted}
    by_key |= {(node, "", own_standing, "", True): list(scores) for node, scores in own.items() if node not in told}
    rows = [
        row for key, scores in by_key.items() for row in _newest_sets(*key, scores, recorded.get(key[0], ()) if key[-1] else ())
    ]
    nodes, those_known = Counter[HeldOutSet](), Counter[HeldOutSet]()
    for row in rows:
        nodes[row.of_set] += row.trusted
        those_known[row.of_set] += row.trusted and row.node in known
    return sorted(
        rows,
        key=lambda row: (
            not row.trusted,
            -those_known[row.of_set],
            -nodes[row.of_set],
            row.of_set,
            *_rank(row),
        ),
    )


def _newest_sets(
    node: str,
    public_key: str,
    standing: str,
    problem: str,
    trusted: bool,
    evaluations: Iterable[Evaluation],
    recorded: Sequence[Evaluation],
) -> list[Row]:
    """A key's rows. Evaluations are ordered by their signed time, so that a repeated report changes
    nothing; if a version was evaluated again, the later result counts.
    """
    sets: dict[HeldOutSet, list[Evaluation]] = {}
    for each in sorted(evaluations, key=attrgetter("at")):
        if each.score is not None:
            sets.setdefault(each.held_out_set, []).append(each)
    rows = []
    for of_set, in_order in sorted(sets.items(), key=lambda each: -each[1][-1].at)[:SETS_A_KEY]:
        newest, by_reward = in_order[-1], in_order[-1].pass_rate is None
        curve = _curve([each for each in in_order if not incomparable(each, newest)], by_reward)
        base = dict(curve).get(0)
        if base is None and (known := base_of(recorded, newest)) is not None and (base := _score(known, by_reward)) is not None:
            curve = [(0, base), *curve]
        rows.append(
            Row(
                node=node,
                public_key=public_key,
                standing=standing,
                problem=problem,
                of_set=of_set,
                base=base,
                newest=newest.score or 0.0,
                policy_version=newest.policy_version,
                at=newest.at,
                curve=thinned(curve, CURVE_POINTS),
                trusted=trusted,
                by_reward=by_reward,
                unknown=newest.unknown,
            )
        )
    return rows


def _rank(row: Row) -> tuple[float, float, str]:
    return (-row.gain if row.gain is not None else 2.0, -row.newest, row.node)


def _score(result: Evaluation | TaskScore, by_reward: bool) -> float | None:
    return result.mean_reward if by_reward else result.pass_rate


def _curve(in_order: Sequence[Evaluation], by_reward: bool) -> list[tuple[int, float]]:
    """Score by policy version. A version below the previous one means that training started
    again: results of later versions from before that are dropped.
    """
    by_version: dict[int, float] = {}
    for each in in_order:
        by_version = {version: rate for version, rate in by_version.items() if version < each.policy_version}
        if (score := _score(each, by_reward)) is not None:
            by_version[each.policy_version] = score
    return sorted(by_version.items())


def thinned(curve: Sequence[tuple[int, float]], most: int) -> tuple[tuple[int, float], ...]:
    """At most `most` points, including the first and the last."""
    if len(curve) <= most:
        return tuple(curve)
    return tuple(curve[round(place * (len(curve) - 1) / (most - 1))] for place in range(most))


def curves_by_task(
    heard: Iterable[Heard[EvalReport]], node: str, public_key: str, recorded: Sequence[Evaluation] = ()
) -> dict[str, list[tuple[int, float]]]:
    """One key's pass rates by dataset, and over all datasets under "", on the held-out set that it
    last reported on; mean rewards where the newest report has no pass rate. Reports with a refused
    signature are left out. `recorded`: as in `leaderboard`, for this node; without a key, its
    curves are those on record.
    """
    mine = [each for each in heard if each.said.node == node and (each.public_key or "") == public_key]
    mine = [each for each in mine if each.standing is not SignatureStatus.REFUSED]
    in_order = sorted((Evaluation.of(each.said) for each in mine), key=attrgetter("at"))
    if not in_order and not public_key:
        in_order = [each for each in recorded if each.score is not None]
    if not in_order:
        return {}
    last = in_order[-1]
    same_set = [each for each in in_order if not incomparable(each, last)]
    kept = {version for version, _ in _curve(same_set, by_reward=True)}
    newest = {each.policy_version: each for each in same_set if each.policy_version in kept}
    trusted = bool(mine) and mine[-1].standing is SignatureStatus.SIGNED
    if trusted and 0 not in kept and (base := base_of(recorded, last)) is not None:
        newest[0] = base
    by_reward = {"": last.pass_rate is None} | {name: each.pass_rate is None for name, each in last.per_task.items()}
    curves: dict[str, dict[int, float]] = {}
    for version, each in newest.items():
        results: dict[str, Evaluation | TaskScore] = {"": each, **each.per_task}
        for dataset, result in results.items():
            if (value := _score(result, by_reward.get(dataset, False))) is not None:
                curves.setdefault(dataset, {})[version] = value
    return {dataset: sorted(curve.items()) for dataset, curve in sorted(curves.items())}


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
    heard: Sequence[Heard[EvalReport]],
    recent: RecentGroups,
    trained: TrainedGroups = NOTHING_TRAINED,
    recorded: ByNode = NO_NODES,
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
    nodes = [_node(node, names, deaths, run) for node in swarm.nodes if node.statuses or node.entry is not None or node.lost]
    here = {node["node"] for node in nodes if node["kind"] != "elsewhere"}
    known = here.union(swarm.known)
    own = recorded if ended else {node.node: [Evaluation.of(node.evaluation)] for node in swarm.nodes if node.evaluation}
    rows = leaderboard(heard, own, known, recorded, ON_RECORD if ended else THIS_SERVER)
    shown_nodes = with_places(nodes, NODES_SENT, lambda node: node["node"] in known)
    shown_rows = with_places(rows, ROWS_SENT, lambda row: row.trusted and row.node in known)
    cells, fewest = trained.cells[:CELLS_SENT], trained.cells[CELLS_SENT:]
    return {
        "at": swarm.at,
        "state": overall([node["kind"] for node in nodes]),
        "swarm": swarm.swarm,
        "swarm_reachable": swarm.swarm_reachable,
        "cluster": IN_CLUSTER in os.environ,
        "nodes": shown_nodes,
        "nodes_left_out": swarm.left_out + len(nodes) - len(shown_nodes),
        "unreadable": swarm.unreadable,
        "earlier": [visible(name, 40) for name in swarm.earlier[:NODES_SENT]],
        "leaderboard": [_row_object(row) for row in shown_rows],
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
    `finished`, `stopped`, `emptied` or `failed`.
    """
    here = [kind for kind in kinds if kind != "elsewhere"]
    if not here:
        return "running" if kinds else "empty"
    for kind, state in (("lost", "emptied"), ("silent", "failed"), ("running", "running"), ("starting", "starting")):
        if kind in here:
            return state
    return "finished" if all(kind == "finished" for kind in here) else "stopped"


def _node(node: NodeState, names: FileNames, deaths: Mapping[str, Deceased], run: Path | None) -> dict[str, Any]:
    """One node's data. Its own words are untrusted text, so they are escaped and cut; `entry` says
    whether its key signed them.
    """
    entry, kind = node.entry, node.kind
    own = {role: deaths[f"{node.node}-{role}"] for role in ROLES if f"{node.node}-{role}" in deaths and kind in DYING_SHOWN}
    words = (
        ", ".join(node.absent) if kind in ("silent", "stopped") else node.words if kind in ("running", "starting", "lost") else ""
    )
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
        "notes": [visible(words, 200) for words in node.notes],
        "away": [_away(node.node, role, own.get(role), run) for role in away],
        "step": node.step,
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


def _row_object(row: Row) -> dict[str, Any]:
    """One row's data, rounded to the precision that is drawn, so that a hundred curves
    stay small.
    """
    return {
        "node": row.node,
        "key": visible(row.public_key, 64),
        "standing": row.standing,
        "problem": row.problem,
        "trusted": row.trusted,
        "set": row.of_set[0][:12],
        "scorer": row.of_set[1][:8],
        "n": row.of_set[2],
        "unknown": row.unknown,
        "by_reward": row.by_reward,
        "base": row.base,
        "newest": round(row.newest, 4),
        "gain": None if row.gain is None else round(row.gain, 4),
        "version": row.policy_version,
        "at": row.at,
        "curve": [[version, round(rate, 3)] for version, rate in row.curve],
    }
