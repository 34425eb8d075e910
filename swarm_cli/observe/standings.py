"""A swarm's nodes and their results, from what its hub shows to spectators: the directory, held-out
scores, and how many groups each node shares. Pure.

Nodes write all of it themselves. What a key signed is shown as its node's; unsigned data is marked,
and data with a refused signature is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shared.contracts import subjects
from shared.contracts.control import EvalReport, NodeRecord
from shared.identity.statements import OTHER_SWARM, Heard
from shared.identity.statements import Standing as Statement
from shared.text import visible
from swarm_cli.console import cell
from swarm_cli.observe.evaluation_log import with_places
from swarm_cli.observe.run_files import Evaluation, gain_of

SILENT_S = 30.0
"""A node renews its entry every 10 s."""
UNSIGNED_SHOWN = 10
"""The most unsigned names shown: anybody who reaches an open hub can invent any number of them."""
LONG_S = 3600.0
"""The server forgets an entry after 15 minutes; a node whose clock is wrong may say anything."""

_COLUMNS = ("node", "held-out", "gain", "version", "shares", "seen", "model")


@dataclass(frozen=True, slots=True)
class Score:
    """A held-out result: `pass_rate` of `n` tasks by `policy_version`; None: no pass is defined, so
    `mean_reward` counts.
    """

    policy_version: int
    pass_rate: float | None
    n: int
    mean_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """One node. `seen_s`: seconds since it renewed its entry; None if it has none. `shared`: its
    groups in the hub's window; None if this user may not ask for them.
    """

    node: str
    model: str
    tasks: tuple[str, ...]
    policy_version: int | None
    seen_s: float | None
    first: Score | None
    newest: Score | None
    shared: int | None
    signed: bool = True
    """False: anybody may have written the data shown for it."""
    known: bool = True
    """Whether its key has signed scores long enough to keep its place, or a roster lists it."""

    @property
    def gain(self) -> float | None:
        """Newest pass rate (mean reward, if no pass is defined) minus the first kept one; None if
        there are not two.
        """
        return None if self.first == self.newest else gain_of(_evaluation(self.newest), _evaluation(self.first))


@dataclass(frozen=True, slots=True)
class Standings:
    """A swarm at one time. `left_out`: number of nodes that are not among `nodes`; `groups`: number
    of groups in the window.
    """

    at: float
    nodes: tuple[Standing, ...]
    groups: int | None
    left_out: int = 0
    unreadable: int = 0
    elsewhere: int = 0
    """Number of entries that are signed for another swarm."""


def standings(
    at: float,
    entries: Sequence[Heard[NodeRecord]],
    reports: Sequence[EvalReport],
    counts: Mapping[str, int] | None,
    *,
    most: int,
    unsigned: Collection[str] = (),
    known: Collection[str] = (),
    left_out: int = 0,
    unreadable: int = 0,
) -> Standings:
    """Combine what was read. Nodes with signed data come first, ordered by their newest score; of
    the others at most `UNSIGNED_SHOWN` are shown.

    Args:
        at: Unix time of the look.
        entries: The directory's entries, checked.
        reports: Held-out scores whose signature is not refused, each node's in order.
        counts: Messages in the stream of groups, by subject; None if they are not known. Subjects
            that belong to no node are ignored.
        most: How many nodes are shown.
        unsigned: Nodes with only unsigned scores.
        known: Nodes that are shown before others if there are more than `most`.
        left_out, unreadable: Numbers of the directory's entries.
    """
    believed = [entry for entry in entries if entry.standing is not Statement.REFUSED]
    signing = {entry.said.node for entry in believed if entry.standing is Statement.SIGNED}
    signing |= {report.node for report in reports if report.node not in unsigned}
    # If a node signs, its unsigned entry is ignored: anybody may have overwritten the signed one.
    by_node = {
        entry.said.node: entry.said for entry in believed if entry.standing is Statement.SIGNED or entry.said.node not in signing
    }
    known = frozenset(known)
    shared = {node: count for subject, count in (counts or {}).items() if (node := subjects.rollouts_author(subject))}
    unshared, groups = (None, None) if counts is None else (0, sum(shared.values()))
    scores: dict[str, list[Score]] = {}
    for report in reports:
        if report.node in signing and report.node in unsigned:
            continue
        scores.setdefault(report.node, []).append(Score(report.policy_version, report.pass_rate, report.n, report.mean_reward))
    found = [
        _standing(name, by_node.get(name), scores.get(name, []), shared.get(name, unshared), at, name in signing, name in known)
        for name in {*by_node, *shared, *scores}
    ]
    found.sort(key=lambda each: (not each.signed, each.newest is None, -_rank(each.newest), each.node))
    signed = [each for each in found if each.signed]
    shown = with_places([*signed, *found[len(signed) :][:UNSIGNED_SHOWN]], most, lambda each: each.signed and each.known)
    elsewhere = sum(entry.problem == OTHER_SWARM for entry in entries)
    return Standings(at, tuple(shown), groups, left_out + len(found) - len(shown), unreadable, elsewhere)


def _standing(
    name: str, record: NodeRecord | None, scores: Sequence[Score], shared: int | None, at: float, signed: bool, known: bool
) -> Standing:
    # Whatever a node has not reported stays empty.
    return Standing(
        name,
        record.model.name if record else "",
        tuple(record.tasks) if record else (),
        record.policy_version if record else None,
        max(0.0, at - record.updated_at) if record else None,
        scores[0] if scores else None,
        scores[-1] if scores else None,
        shared,
        signed,
        known,
    )


def as_object(found: Standings, url: str) -> dict[str, Any]:
    """As JSON."""
    nodes = [{**asdict(node), "gain": node.gain} for node in found.nodes]
    return {
        "at": found.at,
        "url": url,
        "nodes": nodes,
        "groups_in_window": found.groups,
        "left_out": found.left_out,
        "unreadable_entries": found.unreadable,
        "other_swarms_entries": found.elsewhere,
    }


def table(found: Standings, url: str) -> Group:
    """The leaderboard."""
    rows = Table(title=cell(url), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = _marked(found.nodes)
    longest = max(map(len, names), default=4)
    for column, width in zip(_COLUMNS, (longest, 9, 6, 7, 7, 10, 5), strict=True):
        rows.add_column(column, no_wrap=True, min_width=width)
    for name, node in zip(names, found.nodes, strict=True):
        gain = "–" if node.gain is None else f"{node.gain:+.3f}"
        version = "–" if node.policy_version is None else str(node.policy_version)
        shares = "–" if node.shared is None else f"{node.shared:,}" if node.shared else "nothing"
        seen = _seen(node.seen_s)
        rows.add_row(cell(name), _score(node.newest), gain, version, shares, seen, cell(node.model, 32))
    return Group(rows, Text(visible(_caption(found))))


def _marked(nodes: Sequence[Standing]) -> list[str]:
    """Names, marked if unsigned or new. New is only marked once some nodes are known."""
    some_are_known = any(node.signed and node.known for node in nodes)
    return [
        f"{node.node} (unsigned)" if not node.signed else f"{node.node} (new)" if some_are_known and not node.known else node.node
        for node in nodes
    ]


def _caption(found: Standings) -> str:
    groups = "" if found.groups is None else f" groups in the hub's window: {found.groups:,};"
    parts = [f"nodes: {len(found.nodes)};{groups} held-out: pass rate (r: mean reward) / number of tasks, as each node reports"]
    if not found.nodes:
        parts = ["no node has joined yet"]
    if found.left_out:
        parts.append(f"{found.left_out:,} more nodes are not shown")
    if found.elsewhere:
        parts.append(f"{found.elsewhere:,} entries are signed for other swarms: a token chooses the swarm")
    if found.unreadable:
        parts.append(f"{found.unreadable:,} unreadable entries in the directory")
    return "; ".join(parts)


def _score(score: Score | None) -> str:
    return f"{_evaluation(score)}/{score.n}" if score else "–"


def _evaluation(score: Score | None) -> Evaluation | None:
    return None if score is None else Evaluation(score.policy_version, score.pass_rate, score.n, mean_reward=score.mean_reward)


def _rank(score: Score | None) -> float:
    value = None if score is None else score.mean_reward if score.pass_rate is None else score.pass_rate
    return value or 0.0


def _seen(seen_s: float | None) -> str:
    if seen_s is None:
        return "not listed"
    if seen_s < SILENT_S:
        return "now"
    if seen_s < LONG_S:
        return f"{seen_s / 60:.0f} min ago" if seen_s >= 120 else f"{seen_s:.0f} s ago"
    return "long ago"
